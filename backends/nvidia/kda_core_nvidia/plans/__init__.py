"""Plans of this backend's calls: pure functions of a call's metadata and its choice. They need no GPU."""
