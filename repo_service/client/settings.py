"""What configures the client: the node's cache, from ``KVGRAFT_CACHE_…`` variables or as an argument."""

from __future__ import annotations

import os

from repo_service.client.cache import DIRECTORY_VARIABLE, OFF, NodeCache
from repo_service.domain.errors import InvalidInput

MIB_VARIABLE = "KVGRAFT_CACHE_MIB"


def node_cache(choice: NodeCache | str | os.PathLike[str] | None = None) -> NodeCache | None:
    """The cache that a caller asks for; None for none.

    Parameters
    ----------
    choice
        A cache, its directory, or ``off``. None takes what ``KVGRAFT_CACHE_DIR`` says, and by default
        ``kvgraft/chunks`` in the user's cache directory.

    Raises
    ------
    InvalidInput
        If ``KVGRAFT_CACHE_MIB`` is no number of MiB.
    """
    if isinstance(choice, NodeCache):
        return choice
    directory = os.path.expanduser(choice or os.environ.get(DIRECTORY_VARIABLE) or _default_directory())
    if directory == OFF:
        return None
    mib = os.environ.get(MIB_VARIABLE)
    if mib and not (mib.isascii() and mib.isdigit() and len(mib) <= 12 and int(mib)):
        raise InvalidInput(
            f"{MIB_VARIABLE} is {mib[:100]!r}; it must be a number of MiB, 1 or more. {DIRECTORY_VARIABLE}={OFF} "
            "does without a cache"
        )
    return NodeCache(directory, int(mib) * 2**20 if mib else None)


def _default_directory() -> str:
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    # A user without a home has no cache.
    return f"{base}/kvgraft/chunks" if os.path.isabs(base) else OFF
