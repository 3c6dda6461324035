"""kvgraft's repository of byte-exact KV artifacts; it never imports torch or an engine.

``open_repository`` in `repo_service.client` is the one door for callers.
"""

from repo_service.version import __version__

__all__ = ["__version__"]
