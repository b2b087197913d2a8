"""A backend that cannot be imported."""

raise RuntimeError("the vendor's library is missing")
