"""Taking an artifact back: its entry and its tags, out of the store and the index as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from repo_service.domain.views import ArtifactInfo
from repo_service.index import Index
from repo_service.services.documents import entry_key, tag_key
from repo_service.services.undo import follow_rows
from repo_service.storage import Store


def withdraw(
    store: Store, index: Index, artifact: ArtifactInfo, agree: Callable[[ArtifactInfo], None] | None = None
) -> list[str]:
    """Unpublish an artifact and return the names of the tags that went with it.

    Parameters
    ----------
    agree
        Called under the write lock with the artifact as it is then; if it raises, nothing changes.
        It must not use the index.

    Raises
    ------
    ArtifactNotFound
    """
    namespace = artifact.namespace
    entry = entry_key(namespace, artifact.id)

    def write(now: ArtifactInfo) -> None:
        if agree is not None:
            agree(now)
        store.delete(entry)
        for name in now.tags:
            store.delete(tag_key(namespace, name))

    return index.unpublish(namespace, artifact.id, write, partial(follow_rows, store))
