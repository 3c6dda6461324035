"""Times as the index keeps them: microseconds since 1970, UTC. SQLite would drop a time zone."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from repo_service.domain.errors import MalformedRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_microseconds(moment: datetime) -> int:
    """Raises `MalformedRequest` for a time without a zone, which could mean anything."""
    if moment.utcoffset() is None:
        raise MalformedRequest(f"the time {moment.isoformat()} has no time zone; write {moment.isoformat()}Z for UTC")
    return (moment - _EPOCH) // _MICROSECOND


def from_microseconds(value: int) -> datetime:
    return _EPOCH + value * _MICROSECOND


def now() -> int:
    return time.time_ns() // 1000
