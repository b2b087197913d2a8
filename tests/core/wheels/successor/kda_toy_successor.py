"""A backend for the next major version of the plugin contract, in the entry-point group of that one."""

raise RuntimeError("imported by a core of another contract")
