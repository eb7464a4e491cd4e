"""The version of the package, apart so that every room can import it."""

__version__ = "0.1.0"
