"""The audit log: one line of JSON for everything that is removed, and for what callers of the service do."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

audit = logging.getLogger("kvgraft.audit")


def record(**fields: Any) -> None:
    """Write a line with the time in front; its values are JSON."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    audit.info("%s", json.dumps({"at": at, **fields}))
