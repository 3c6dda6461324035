"""Canonical JSON and framing: one spelling for each value, one value for each encoding."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repo_service.domain.canonical import (
    MAX_DEPTH,
    MAX_INTEGER,
    canonical_json,
    check_canonical,
    frame,
    parse_json,
    parse_loose_json,
)
from repo_service.domain.errors import KvgraftError, MalformedDocument, TooLarge

LIMIT = 2**20

integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
texts = st.text(st.characters(codec="utf-8"))
scalars = st.none() | st.booleans() | integers | texts


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=5) | st.dictionaries(texts, values, max_size=5)


canonical_values = st.recursive(scalars, _containers, max_leaves=25)
framed_values = st.recursive(scalars | st.binary(), _containers, max_leaves=25)


def parse(data: bytes) -> Any:
    return parse_json(data, limit=LIMIT, what="document")


def parse_loosely(data: bytes) -> Any:
    return parse_loose_json(data, what="document")


def typed(value: Any) -> Any:
    """A value in which True is not 1."""
    if isinstance(value, dict):
        return dict, {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return list, [typed(item) for item in value]
    return type(value), value


@settings(deadline=None)
@given(canonical_values)
def test_a_value_survives_its_canonical_form(value: Any) -> None:
    assert typed(parse(canonical_json(value))) == typed(value)


@settings(deadline=None)
@given(st.dictionaries(texts, canonical_values, max_size=8), st.randoms())
def test_the_order_of_insertion_changes_nothing(value: dict[str, Any], order: random.Random) -> None:
    pairs = list(value.items())
    order.shuffle(pairs)
    assert canonical_json(dict(pairs)) == canonical_json(value)
    assert frame(dict(pairs)) == frame(value)


@settings(deadline=None)
@given(canonical_values, st.booleans(), st.sampled_from([None, 0, 1]), st.booleans())
def test_every_other_spelling_is_refused(value: Any, sort: bool, indent: int | None, escape: bool) -> None:
    other = json.dumps(value, sort_keys=sort, indent=indent, ensure_ascii=escape).encode()
    assert typed(parse_loosely(other)) == typed(value)
    if other != canonical_json(value):
        with pytest.raises(MalformedDocument, match="canonical"):
            parse(other)


@pytest.mark.parametrize(
    "data",
    [
        '{"b":1,"a":2}',
        '{"\U0001f600":1,"\uffff":2}',
        '{"a": 1}',
        "[1, 2]",
        " 1",
        "1\n",
        '"\\u0061"',
        '"\\/"',
        '"\\u001F"',
        '"\\u0009"',
        '"\\u00e9"',
        '"\\ud83d\\ude00"',
        "-0",
    ],
)
def test_a_document_has_one_spelling(data: str) -> None:
    parse_loosely(data.encode())
    with pytest.raises(MalformedDocument, match="canonical"):
        parse(data.encode())


@pytest.mark.parametrize("read", [parse, parse_loosely])
class TestReading:
    @pytest.mark.parametrize(
        ("data", "key"),
        [
            ('{"a":1,"a":1}', "'a'"),
            ('{"a":1,"\\u0061":2}', "'a'"),
            ('[{"x":{"k":[],"k":{}}}]', "'k'"),
            ('{"\\ud800":1,"\\ud800":2}', r"'\ud800'"),
        ],
    )
    def test_duplicate_keys_are_refused(self, read: Callable[[bytes], Any], data: str, key: str) -> None:
        with pytest.raises(MalformedDocument, match="twice") as caught:
            read(data.encode())
        assert caught.value.details["key"] == key
        caught.value.message.encode()

    def test_the_last_of_many_keys_may_be_the_duplicate(self, read: Callable[[bytes], Any]) -> None:
        names = [*map(str, range(100_000)), "99999"]
        data = "{" + ",".join(f'"{name}":0' for name in names) + "}"
        with pytest.raises(MalformedDocument, match="'99999' twice"):
            read(data.encode())

    @pytest.mark.parametrize("text", ["1.0", "1e5", "-0.0", "1E400", "NaN", "Infinity", "-Infinity", '{"a":[0.5]}'])
    def test_floats_are_refused(self, read: Callable[[bytes], Any], text: str) -> None:
        with pytest.raises(MalformedDocument, match="only integers"):
            read(text.encode())

    @pytest.mark.parametrize("value", [2**63, -(2**63), 10**40, 10**4299], ids=int.bit_length)
    def test_integers_beyond_64_bits_are_refused(self, read: Callable[[bytes], Any], value: int) -> None:
        with pytest.raises(MalformedDocument, match="64 bits"):
            read(b"[%d]" % value)

    def test_an_integer_of_a_million_digits_is_refused(self, read: Callable[[bytes], Any]) -> None:
        with pytest.raises(MalformedDocument):
            read(b"1" * 10**6)

    @pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 1500, 100_000])
    @pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
    def test_deep_nesting_is_refused(
        self, read: Callable[[bytes], Any], opening: bytes, closing: bytes, depth: int
    ) -> None:
        with pytest.raises(MalformedDocument, match="nested too deeply"):
            read(opening * depth + b"1" + closing * depth)

    @pytest.mark.parametrize("text", ['"\\ud800"', '["\\udfff\\ud800"]', '{"\\udead":1}', '{"a":{"b":"x\\ud83d"}}'])
    def test_lone_surrogates_are_refused(self, read: Callable[[bytes], Any], text: str) -> None:
        with pytest.raises(MalformedDocument, match="surrogate") as caught:
            read(text.encode())
        caught.value.message.encode()

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{",
            b"[1,]",
            b'{"a":1,}',
            b"{'a':1}",
            b'{"a" 1}',
            b"nul",
            b"01",
            b"+1",
            b"0x10",
            b'"\n"',
            b'"\\x41"',
            b"1 2",
            b"\xff",
            b'"\xed\xa0\x80"',
            b"\xef\xbb\xbf1",
            '"a"'.encode("utf-16"),
            b"\0",
        ],
    )
    def test_what_is_no_json_in_utf8_is_refused(self, read: Callable[[bytes], Any], data: bytes) -> None:
        with pytest.raises(MalformedDocument):
            read(data)

    @settings(deadline=None)
    @given(data=st.binary(max_size=200) | st.text('[]{}":,\\u0123456789dDeE.-+ truefalsn').map(str.encode))
    def test_arbitrary_bytes_give_a_canonical_value_or_our_error(
        self, read: Callable[[bytes], Any], data: bytes
    ) -> None:
        try:
            value = read(data)
        except KvgraftError:
            return
        check_canonical(value)


def test_a_document_over_its_limit_is_refused_unread() -> None:
    with pytest.raises(TooLarge) as caught:
        parse_json(b"{" * 101, limit=100, what="document")
    assert caught.value.details == {"size": 101, "limit": 100}
    assert parse_json(b"1" * 5, limit=5, what="document") == 11111


def nested(depth: int, inner: Any = 1) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("encode", [canonical_json, frame, check_canonical])
class TestEncoding:
    @pytest.mark.parametrize(
        "value",
        [0.0, 1.5, float("nan"), float("inf"), 1j, object(), {1, 2}, bytearray(b"x"), {"a": [{"b": 0.1}]}],
        ids=lambda value: type(value).__name__,
    )
    def test_values_without_a_canonical_form_are_refused(self, encode: Callable[[Any], Any], value: Any) -> None:
        with pytest.raises(MalformedDocument):
            encode(value)

    @pytest.mark.parametrize("value", [{1: 2}, {None: 1}, {"a": 1, 2: 3}, {b"a": 1}, [{("a",): 1}]], ids=repr)
    def test_keys_are_strings(self, encode: Callable[[Any], Any], value: Any) -> None:
        with pytest.raises(MalformedDocument, match="not a string"):
            encode(value)

    @pytest.mark.parametrize("value", [2**63, -(2**63), 10**5000], ids=int.bit_length)
    def test_integers_have_64_bits(self, encode: Callable[[Any], Any], value: int) -> None:
        with pytest.raises(MalformedDocument, match="64 bits"):
            encode(value)
        encode([MAX_INTEGER, -MAX_INTEGER])

    @pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["x", {"y": "a\udc80"}]], ids=ascii)
    def test_lone_surrogates_are_refused(self, encode: Callable[[Any], Any], value: Any) -> None:
        with pytest.raises(MalformedDocument, match="surrogate"):
            encode(value)

    def test_nesting_is_bounded(self, encode: Callable[[Any], Any]) -> None:
        encode(nested(MAX_DEPTH))
        encode(nested(MAX_DEPTH - 1, {"a": "b"}))
        for value in (nested(MAX_DEPTH + 1), nested(MAX_DEPTH, []), nested(MAX_DEPTH, {}), nested(10_000)):
            with pytest.raises(MalformedDocument, match="nested too deeply"):
                encode(value)


def test_bytes_are_framed_but_have_no_json() -> None:
    assert frame([b"a", "a"]) == b"l2:b1:as1:a"
    with pytest.raises(MalformedDocument, match="bytes"):
        canonical_json([b"a"])


def unframe(data: bytes) -> Any:
    """Decode a frame; that this is possible is what makes framing unambiguous."""
    value, rest = _unframe(data)
    assert not rest
    return value


def _unframe(data: bytes) -> tuple[Any, bytes]:
    tag, data = data[:1], data[1:]
    if tag in b"ntf":
        return {b"n": None, b"t": True, b"f": False}[tag], data
    number, _, data = data.partition(b":")
    size = int(number)
    if tag == b"l":
        items = []
        for _ in range(size):
            item, data = _unframe(data)
            items.append(item)
        return items, data
    if tag == b"d":
        pairs = {}
        for _ in range(size):
            key, data = _unframe(data)
            pairs[key], data = _unframe(data)
        return pairs, data
    body, data = data[:size], data[size:]
    return {b"i": int, b"s": bytes.decode, b"b": bytes}[tag](body), data


@settings(deadline=None)
@given(framed_values)
def test_a_frame_determines_its_value(value: Any) -> None:
    assert typed(unframe(frame(value))) == typed(value)


@settings(deadline=None)
@given(framed_values, framed_values)
def test_different_values_have_different_frames(a: Any, b: Any) -> None:
    assert (frame(a) == frame(b)) == (typed(a) == typed(b))


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=6), st.data())
def test_moving_text_between_neighbours_changes_the_frame(fields: list[str], data: st.DataObject) -> None:
    joined = "".join(fields)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), max_size=5)))
    moved = [joined[a:b] for a, b in itertools.pairwise([0, *cuts, len(joined)])]
    assert (frame(fields) == frame(moved)) == (fields == moved)


def test_values_that_look_alike_have_different_frames() -> None:
    alike: list[Any] = [None, False, 0, "", b"", [], {}, "null", "0", b"0", "n", [None], [[]], {"": None}, [0], ["0"]]
    alike += [True, 1, "1", b"1", [1], "true", {"1": 1}, ["1", 1], [["1"], 1], [{"1": 1}], -1, "-1", "s1:1", b"s1:1"]
    assert len({frame(value) for value in alike}) == len(alike)
