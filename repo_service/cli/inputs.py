"""Texts and token ids that commands are given in files."""

from __future__ import annotations

import json
import sys

from repo_service.domain.errors import InvalidInput, InvalidTokens

MAX_INPUT_BYTES = 64 * 2**20


def read_text(name: str) -> str:
    """A UTF-8 file; ``-`` is standard input.

    Raises
    ------
    InvalidInput
    """
    try:
        return _read(name).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not UTF-8: {error}") from None


def read_tokens(name: str) -> list[int]:
    """Token ids: a JSON list, or integers apart by white space.

    Raises
    ------
    InvalidTokens, InvalidInput
    """
    text = read_text(name).strip()
    try:
        ids = json.loads(text) if text.startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise InvalidTokens(f"{name} holds no token ids: a JSON list of integers, or integers apart by white space")
    return ids


def _read(name: str) -> bytes:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{name} can't be read: {error.strerror}", path=name) from None
    if len(data) > MAX_INPUT_BYTES:
        raise InvalidInput(f"{name} has more than {MAX_INPUT_BYTES} bytes, which is the limit", path=name)
    return data
