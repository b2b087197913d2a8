"""Plans of this backend's calls: pure functions of a call's metadata and the chip. They need no GPU."""
