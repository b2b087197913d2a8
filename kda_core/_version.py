"""The version of the package, for the packaging tool and for modules that ``__init__`` imports."""

__version__ = "0.1.0"
