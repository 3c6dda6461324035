"""The storage contract. Every backend passes ``tests/test_storage.py``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from typing_extensions import Buffer

from repo_service.domain.errors import DocumentCorrupt, InvalidInput
from repo_service.domain.frame import NONE
from repo_service.domain.manifest import MAX_MANIFEST_BYTES

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_KEY = re.compile(rf"(?!tmp(/|\Z)){_SEGMENT}(/{_SEGMENT})*", re.ASCII)

MAX_KEY_CHARACTERS = 512

MAX_OBJECT_BYTES = MAX_MANIFEST_BYTES
"""No object is larger than a manifest may be."""


def is_key(key: str) -> bool:
    """True for a valid key.

    A key is 1 to 512 characters of segments joined by ``/``; a segment is 1 to 255 letters, digits,
    ``.``, ``_`` and ``-``, beginning with a letter, a digit or ``_``. The first segment is not
    ``tmp``, which is the backends' own. No key can leave the store.
    """
    return len(key) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(key) is not None


def check_size(key: str, size: int, limit: int) -> int:
    """Return an object's size unchanged if it may be read into memory.

    Raises
    ------
    DocumentCorrupt
    """
    if size > limit:
        raise DocumentCorrupt(
            f"{key} has {size} bytes, which is more than anything stored there has (at most {limit})",
            key=key,
            size=size,
        )
    return size


def check_key(key: str) -> str:
    """Return a valid key unchanged.

    Raises
    ------
    InvalidInput
    """
    if not is_key(key):
        raise InvalidInput(f"{key[:100]!r} is not a storage key", key=key[:100])
    return key


class Store(ABC):
    """Objects by key.

    An object is seen whole or not at all, whatever happens to the process that writes it, and is
    durable once a put has returned. Objects are small enough for memory (chunks of at most 8 MiB,
    documents). Methods may be called from any thread and from several processes. Callers keep to
    trees: no object's key is, in whole segments, the beginning of another's; a backend may refuse
    such a key as `Unavailable`, and finds nothing under it.

    Failures: `StorageFull` when there is no space, `DocumentCorrupt` for an object that is there and
    whose medium can't read it, `Unavailable` for any other fault of the backend, `InvalidInput` for a
    key outside the grammar.
    """

    codec: str = NONE
    """What the chunks in it are stored with. A repository's marker says so; a store itself takes and gives bytes as they are."""

    concurrency: ClassVar[int] = 1
    """How many calls at once are faster than one after the other."""

    @abstractmethod
    def get(self, key: str, limit: int = MAX_OBJECT_BYTES) -> bytes | None:
        """The object, or None if there is none.

        One of more than ``limit`` bytes is `DocumentCorrupt`, and no memory is taken for it.
        """

    @abstractmethod
    def read_into(self, key: str, out: memoryview, seen: Callable[[memoryview], object]) -> int | None:
        """Read an object into ``out``, handing each piece to ``seen`` in order while it is in cache.

        Returns the object's size in bytes, or None if there is no object. An object larger than
        ``out`` fills it; the size returned says so.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write or replace an object."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write an object unless the key exists, as one atomic step; returns False if it does.

        Either way the object under the key is durable when this returns.
        """

    @abstractmethod
    def delete(self, key: str, *, durable: bool = True) -> None:
        """Remove an object; removing what is not there is no error.

        A power loss may bring back what was not removed durably.
        """

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def age_s(self, key: str) -> float | None:
        """Seconds since an object was last written, by the backend's clock, or None if there is none."""

    @abstractmethod
    def remove_leftovers(self, *, dry_run: bool = False) -> Iterator[str]:
        """Remove what writers that ended in the middle left behind, and name it; a running writer's is never touched."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """Keys below ``prefix`` (whole segments), in a stable order. For rebuilding and scrubbing; never on a read path.

        What is in the backend under no valid key is passed over.
        """

    def url_of(self, key: str, seconds: int) -> str | None:  # noqa: ARG002
        """A URL at which anyone may read the object for ``seconds``, or None if the backend gives none.

        Whether there is an object is not looked up. The URL is a secret for as long as it is good.
        """
        return None

    def upload_url_of(self, key: str, size: int, seconds: int) -> str | None:  # noqa: ARG002
        """A URL at which anyone may PUT an object of ``size`` bytes for ``seconds``, as often as they like, or None.

        The URL is a secret for as long as it is good.
        """
        return None

    def close(self) -> None:
        """Let go of connections, if there are any; the store can still be used."""
        return
