"""What the service writes to its log: lines of text, or of JSON, each with the id of the request it belongs to."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from repo_service.settings import Settings

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered, also on the threads that work for it."""

access = logging.getLogger("kvgraft.access")
"""One line for each request."""

_OWN = ("kvgraft", "repo_service")

# What ends a line, or plays with a terminal, comes from a client's words and is shown as an escape.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    code: f"\\u{code:04x}" for code in (0x2028, 0x2029)
}


class TextLines(logging.Formatter):
    """``time level logger message``, then the request's id; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}"
        if not line.isprintable():
            line = line.translate(_ESCAPED)
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line += f" request_id={request_id}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def logged(settings: Settings) -> Iterator[None]:
    """Write the log to standard error as ``settings`` say, until the block ends.

    Of other libraries only warnings and errors are written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    root = logging.getLogger()
    before = {name: logging.getLogger(name).level for name in _OWN}
    root.addHandler(handler)
    for name in _OWN:
        logging.getLogger(name).setLevel(settings.log_level.upper())
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        root.removeHandler(handler)
