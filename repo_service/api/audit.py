"""Who did what: a line in the audit log for each act of a caller, with its outcome."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from repo_service.api.errors import OUTCOME
from repo_service.domain.errors import KvgraftError
from repo_service.services.audit import record

ANONYMOUS = "anonymous"
REQUEST_ID = "x-request-id"

DONE = "done"
UNANSWERED = "unanswered"

_WHAT = "kvgraft.what"
_LONGEST = 200
_SECRET = re.compile(r"(?<=kvg_[0-9a-f]{12})_\w+")


def note(request: Request, **what: Any) -> None:
    """Add what the path does not say to the line for this request; values are JSON."""
    request.scope.setdefault(_WHAT, {}).update(what)


@contextmanager
def recorded(scope: Scope, act: str, token_id: str | None, namespace: str | None, send: Send) -> Iterator[Send]:
    """Write one line for a request: before the end of its answer is sent, or, without one, when the block ends.

    Gives what the answer is to be sent through: whoever has all of it finds the line.
    """
    status = 0
    written = False

    def write(outcome: str) -> None:
        nonlocal written
        if not written:
            written = True
            what = {name: _shown(value) for name, value in scope["path_params"].items() if name != "namespace"}
            where = {} if namespace is None else {"namespace": namespace[:_LONGEST]}
            record(who=_who(scope, token_id), did=act, **where, what=what | scope.get(_WHAT, {}), outcome=outcome)

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            write(scope.get(OUTCOME, str(status)) if status >= 400 else DONE)
        await send(message)

    try:
        yield watched
    except KvgraftError as error:
        write(error.code)
        raise
    except Exception:
        write(KvgraftError.code)
        raise
    finally:
        write(UNANSWERED)


def _shown(value: object) -> str:
    """A value of the path, without the secret that somebody took for an id."""
    return _SECRET.sub("_…", str(value))[:_LONGEST]


def _who(scope: Scope, token_id: str | None) -> dict[str, str | None]:
    client = scope.get("client")
    who = {"token": token_id or ANONYMOUS, "address": client[0] if client else None}
    request_id = Headers(scope=scope).get(REQUEST_ID)
    return who if request_id is None else {**who, "request": request_id[:_LONGEST]}
