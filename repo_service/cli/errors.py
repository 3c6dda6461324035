"""Failures as a user meets them: an exit code, a line of text, or an object of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import typer

from repo_service.cli.output import printable
from repo_service.domain.errors import (
    AccessDenied,
    Conflict,
    Corrupt,
    ExactnessError,
    InexactReplay,
    InvalidInput,
    KvgraftError,
    ModelUnavailable,
    NotFound,
    PortInUse,
    RepositoryError,
    TooLarge,
)

INEXACT = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
UNAVAILABLE = 5
MISMATCH = 6
MISSING = 69
INTERNAL = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES: Mapping[int, str] = {
    0: "done; whatever was checked is exact and whole",
    INEXACT: "the check found something inexact, lost or altered",
    USAGE: "a mistake in the arguments or in the input",
    NOT_FOUND: "no such artifact, tag, push or chunk",
    CONFLICT: "a conflict: a divergence, an ambiguous id, a destination that exists",
    UNAVAILABLE: "the repository or its service is unavailable, full, of another kind, or refuses access",
    MISMATCH: "the fingerprint differs, the model is not supported, or its weights were changed",
    MISSING: "the engine is not installed, or the model can't be had",
    INTERNAL: "a fault in kvgraft",
    INTERRUPTED: "interrupted by Ctrl-C",
}

TRACEBACK_VARIABLE = "KVGRAFT_TRACEBACK"

# The first that fits; subclasses stand before their bases.
_CODES: tuple[tuple[type[KvgraftError], int], ...] = (
    (InexactReplay, INEXACT),
    (Corrupt, INEXACT),
    (InvalidInput, USAGE),
    (TooLarge, USAGE),
    (NotFound, NOT_FOUND),
    (Conflict, CONFLICT),
    (RepositoryError, UNAVAILABLE),
    (AccessDenied, UNAVAILABLE),
    (PortInUse, UNAVAILABLE),
    (ModelUnavailable, MISSING),
    (ExactnessError, MISMATCH),
)

# Of the parser's errors typer exports this one alone; its base is the base of them all.
_UsageError = typer.BadParameter.__bases__[0]


class CommandFailed(Exception):
    """A failure that the library has no error for.

    Parameters
    ----------
    code, message, details
        As in `KvgraftError`.
    exit_code
        One of `EXIT_CODES`.
    """

    def __init__(self, code: str, message: str, exit_code: int, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details
        self.exit_code = exit_code


def report(error: Exception, *, as_json: bool) -> int:
    """Write an error to standard error and return the exit code it stands for."""
    if isinstance(error, KvgraftError):
        body = error.to_json()
        code = next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL)
    elif isinstance(error, CommandFailed):
        body = {"code": error.code, "message": error.message, "details": error.details}
        code = error.exit_code
    elif isinstance(error, _UsageError):
        body = {"code": "usage", "message": _usage(error), "details": {}}
        code = USAGE
    else:
        body = {"code": KvgraftError.code, "message": _fault(error), "details": {"type": type(error).__name__}}
        code = INTERNAL
    if code == INTERNAL and os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    text = json.dumps({"error": body}) if as_json else f"kvgraft: {printable(body['message'])} [{body['code']}]"
    print(text, file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "kvgraft"
    return f"{error.format_message().rstrip('.')}; see {command} --help"


def _fault(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"kvgraft failed in a way that it should not: {type(error).__name__}: {text[:500]} (set {TRACEBACK_VARIABLE}=1 for the traceback)"
