"""The distribution's version and the store format's version."""

__version__ = "0.1.0"

FORMAT_VERSION = 2
