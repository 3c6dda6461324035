"""Canonical encodings: JSON for documents, tagged and length-framed bytes for hashing.

Neither admits floats: their text differs between languages. A float in a fingerprint
is written as ``{"float": "<C99 hexadecimal>"}`` by whoever measures it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from repo_service.domain.errors import MalformedDocument, TooLarge

_TYPE_RULE = "a canonical value is null, a boolean, an integer of 64 bits, a string, a list or an object"

MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 64

_INTEGER_DIGITS = 20


def canonical_json(value: Any) -> bytes:
    """Encode as UTF-8 JSON with sorted keys and no white space.

    Raises
    ------
    MalformedDocument
        As `check_canonical`.
    """
    check_canonical(value)
    return _ENCODER.encode(value).encode()


def parse_json(data: bytes, *, limit: int, what: str) -> Any:
    """Decode a document that must be canonical, of at most ``limit`` bytes.

    Raises
    ------
    TooLarge, MalformedDocument
    """
    if len(data) > limit:
        raise TooLarge(f"the {what} has {len(data)} bytes; the limit is {limit}", size=len(data), limit=limit)
    value = _decode(data, what)
    # Without these no value that was decoded is too deep, and no text holds a lone surrogate.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH or b"\\u" in data:
        check_canonical(value)
    if _ENCODER.encode(value).encode() != data:
        raise MalformedDocument(
            f"the {what} is not canonical JSON: keys sorted, no white space, UTF-8 without escapes for printable characters"
        )
    return value


def parse_loose_json(data: bytes, *, what: str) -> Any:
    """Decode JSON in any layout, refusing duplicate keys and whatever is no canonical value.

    Raises
    ------
    MalformedDocument
    """
    value = _decode(data, what)
    check_canonical(value)
    return value


class _RefusedError(ValueError):
    """What is wrong with a document, and the details."""


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(items)
    if len(result) != len(items):
        duplicate = next(name for name, n in Counter(name for name, _ in items).items() if n > 1)
        shown = ascii(duplicate[:100])
        raise _RefusedError(f"has the key {shown} twice", {"key": shown})
    return result


def _integer(text: str) -> int:
    if len(text) > _INTEGER_DIGITS:
        raise _RefusedError(f"holds an integer of {len(text)} characters, which is beyond 64 bits", {})
    value = int(text)
    if abs(value) > MAX_INTEGER:
        raise _RefusedError(f"holds the integer {text}, which is beyond 64 bits", {})
    return value


def _no_float(text: str) -> Any:
    raise _RefusedError(f"holds the number {text[:40]}; only integers are canonical", {})


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_int=_integer, parse_float=_no_float, parse_constant=_no_float
)


def _decode(data: bytes, what: str) -> Any:
    try:
        return _DECODER.decode(data.decode())
    except _RefusedError as error:
        message, details = error.args
        raise MalformedDocument(f"the {what} {message}", **details) from None
    except UnicodeDecodeError as error:
        raise MalformedDocument(f"the {what} is not UTF-8: {error}") from None
    except RecursionError:
        raise MalformedDocument(f"the {what} is nested too deeply: at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise MalformedDocument(f"the {what} is not JSON: {error}") from None


def check_canonical(value: Any) -> None:
    """Refuse what canonical JSON can't hold.

    Raises
    ------
    MalformedDocument
        For a float, an integer beyond 64 bits, a lone surrogate, a key that is no string, or
        more than `MAX_DEPTH` lists and objects within one another.
    """
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, int):
                _check_integer(item)
            elif isinstance(item, (dict, list, tuple)):
                _check_depth(depth)
                if isinstance(item, dict):
                    for key in item:
                        _check_key(key)
                    below.extend(item.values())
                else:
                    below.extend(item)
            elif item is not None:
                raise MalformedDocument(f"{type(item).__name__} {item!r}: {_TYPE_RULE}")
        level, depth = below, depth + 1


def frame(value: Any) -> bytes:
    """Encode for hashing: each item carries a type tag and its length.

    ``n`` null, ``t`` true, ``f`` false, ``i<length>:<decimal>``, ``s<length>:<UTF-8>``,
    ``b<length>:<bytes>``, ``l<count>:<items>``, ``d<count>:<key and value, keys in code point order>``.

    Raises
    ------
    MalformedDocument
        As `check_canonical`; bytes are admitted here.
    """
    parts: list[bytes] = []
    _frame(value, parts, 0)
    return b"".join(parts)


def _frame(value: Any, parts: list[bytes], depth: int) -> None:
    if value is None:
        parts.append(b"n")
    elif value is True:
        parts.append(b"t")
    elif value is False:
        parts.append(b"f")
    elif isinstance(value, int):
        _check_integer(value)
        parts.append(_framed(b"i", b"%d" % value))
    elif isinstance(value, str):
        _check_text(value)
        parts.append(_framed(b"s", value.encode()))
    elif isinstance(value, bytes):
        parts.append(_framed(b"b", value))
    elif isinstance(value, (list, tuple)):
        _check_depth(depth)
        parts.append(b"l%d:" % len(value))
        for item in value:
            _frame(item, parts, depth + 1)
    elif isinstance(value, dict):
        _check_depth(depth)
        for key in value:
            _check_key(key)
        parts.append(b"d%d:" % len(value))
        for key in sorted(value):
            _frame(key, parts, depth + 1)
            _frame(value[key], parts, depth + 1)
    else:
        raise MalformedDocument(f"{type(value).__name__} {value!r}: {_TYPE_RULE}")


def _framed(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise MalformedDocument(f"a value is nested too deeply: at most {MAX_DEPTH} levels")


def _check_integer(value: int) -> None:
    if abs(value) > MAX_INTEGER:
        raise MalformedDocument(f"an integer of {value.bit_length()} bits is beyond 64 bits")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise MalformedDocument(f"the text {text[:100]!a} holds a lone surrogate") from None


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise MalformedDocument(f"the key {key!r} is not a string")
    _check_text(key)
