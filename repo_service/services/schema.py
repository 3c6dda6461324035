"""The schema of an index, brought up to date before the services that use it start."""

from __future__ import annotations

from repo_service.domain.views import SchemaReport
from repo_service.index import Index


def migrate_index(url: str) -> SchemaReport:
    """Upgrade the index at ``url`` to this version's schema; harmless while others do the same.

    Raises
    ------
    MalformedUrl, NewerFormat, Unavailable, DocumentCorrupt
    """
    return Index.migrate(url)
