"""Manifests, block records and block keys: whole, in order, and nothing else under their digests."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import artifact, fingerprint

from repo_service.domain.canonical import canonical_json
from repo_service.domain.digest import BLAKE3, SHA256, chunk_digest, parse_digest, sha256_digest
from repo_service.domain.errors import (
    DocumentCorrupt,
    InvalidTokens,
    KvgraftError,
    MalformedDigest,
    MalformedDocument,
    TooLarge,
)
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import (
    MAX_ANNOTATION_CHARACTERS,
    MAX_ANNOTATIONS,
    MAX_MANIFEST_BYTES,
    MAX_TEXT_CHARACTERS,
    Exactness,
    Manifest,
    require_digest,
)
from repo_service.domain.record import MAX_RECORD_BYTES, BlockRecord, block_key, block_keys
from repo_service.domain.schedule import DECODE, PREFILL, Step, canonical_steps
from repo_service.domain.tokens import (
    MAX_TOKEN_ID,
    MAX_TOKENS,
    decode_tokens,
    encode_tokens,
    token_chunk_count,
    token_chunks,
)

ROOT = Path(__file__).parent.parent
TOKENS = [7 * i % 1000 for i in range(40)]
MANIFEST, RECORDS, _ = artifact(TOKENS, annotations={"user": "Åsa"}, text="a text", parent="sha256:" + "ab" * 32)
LAYOUT = MANIFEST.layout
SHA = "sha256:" + "0" * 64
BLAKE = "blake3:" + "0" * 64

tokens_lists = st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=80)


def document(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data)
    return value


def parse_manifest(**fields: Any) -> Manifest:
    return Manifest.parse(canonical_json({**document(MANIFEST.data), **fields}))


def parse_record(index: int = 0, **fields: Any) -> BlockRecord:
    return BlockRecord.parse(canonical_json({**document(RECORDS[index].data), **fields}))


def with_records(records: list[BlockRecord]) -> Manifest:
    """The manifest that names these records, whatever they are."""
    return replace(MANIFEST, blocks=tuple((record.key, record.digest) for record in records))


# Documents


@settings(deadline=None)
@given(tokens_lists, st.booleans(), st.sampled_from([1, 4, 16]), st.text(st.characters(codec="utf-8")))
def test_documents_survive_reading(tokens: list[int], private: bool, block_tokens: int, text: str) -> None:
    manifest, records, _ = artifact(tokens, block_tokens=block_tokens, private=private, text=text)
    read = Manifest.parse(manifest.data)
    assert read == manifest
    assert read.data == manifest.data
    assert read.id == f"sha256:{hashlib.sha256(manifest.data).hexdigest()}"
    assert [BlockRecord.parse(record.data) for record in records] == records
    read.check_records(records)
    read.check_keys(records, tokens)


@pytest.mark.parametrize("exactness", [Exactness(), Exactness("lossy", "blosc", "max 0.01")])
def test_the_exactness_class_survives_reading(exactness: Exactness) -> None:
    manifest, _, _ = artifact(TOKENS, exactness=exactness)
    assert Manifest.parse(manifest.data).exactness == exactness


@pytest.mark.parametrize("field", document(MANIFEST.data))
def test_a_manifest_has_exactly_its_fields(field: str) -> None:
    whole = document(MANIFEST.data)
    with pytest.raises(MalformedDocument, match="fields"):
        Manifest.parse(canonical_json({name: value for name, value in whole.items() if name != field}))
    with pytest.raises(MalformedDocument, match="fields"):
        Manifest.parse(canonical_json({**whole, f"{field}2": None}))


@pytest.mark.parametrize("field", document(RECORDS[0].data))
def test_a_record_has_exactly_its_fields(field: str) -> None:
    whole = document(RECORDS[0].data)
    with pytest.raises(MalformedDocument, match="not a block record"):
        BlockRecord.parse(canonical_json({name: value for name, value in whole.items() if name != field}))
    with pytest.raises(MalformedDocument, match="not a block record"):
        BlockRecord.parse(canonical_json({**whole, f"{field}2": None}))


@pytest.mark.parametrize("value", [None, True, 1, "x", [], {}, [1], {"x": 1}], ids=repr)
@pytest.mark.parametrize("field", document(MANIFEST.data))
def test_a_manifest_field_of_another_type_is_refused(field: str, value: Any) -> None:
    if (field, repr(value)) in {("version", "1"), ("text", "None"), ("text", "'x'"), ("annotations", "{}")}:
        assert parse_manifest(**{field: value})
    else:
        with pytest.raises(MalformedDocument):
            parse_manifest(**{field: value})


@pytest.mark.parametrize("parse", [Manifest.parse, BlockRecord.parse])
@pytest.mark.parametrize("value", [None, True, 1, "x", [], {}, [1], {"x": 1}], ids=repr)
def test_what_is_no_document_is_refused(parse: Callable[[bytes], Any], value: Any) -> None:
    with pytest.raises(MalformedDocument):
        parse(canonical_json(value))


@pytest.mark.parametrize("version", [True, 0, 2, 99])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(MalformedDocument, match="version"):
        parse_manifest(version=version)


@pytest.mark.parametrize(
    ("parse", "limit"), [(Manifest.parse, MAX_MANIFEST_BYTES), (BlockRecord.parse, MAX_RECORD_BYTES)]
)
def test_a_hundred_megabytes_of_json_are_refused_unread(parse: Callable[[bytes], Any], limit: int) -> None:
    with pytest.raises(TooLarge) as caught:
        parse(b'{"a":' + b"[" * 100_000_000)
    assert caught.value.details["limit"] == limit


@pytest.mark.parametrize("data", [MANIFEST.data, RECORDS[0].data], ids=["manifest", "record"])
def test_duplicate_keys_are_refused(data: bytes) -> None:
    name = next(iter(document(data)))
    doubled = b'{"%b":null,' % name.encode() + data[1:]
    for parse in (Manifest.parse, BlockRecord.parse):
        with pytest.raises(MalformedDocument, match="twice"):
            parse(doubled)


@pytest.mark.parametrize(
    ("annotations", "valid"),
    [
        ({f"n{i}": "" for i in range(MAX_ANNOTATIONS)}, True),
        ({f"n{i}": "" for i in range(MAX_ANNOTATIONS + 1)}, False),
        ({"n": "é" * MAX_ANNOTATION_CHARACTERS}, True),
        ({"n": "x" * (MAX_ANNOTATION_CHARACTERS + 1)}, False),
        ({"n" * 128: "x"}, True),
        ({"n" * 129: "x"}, False),
        ({"": "x"}, False),
        ({"n": 1}, False),
        ({"n": None}, False),
        ({"n": ["x"]}, False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_annotations_are_limited(annotations: dict[str, Any], valid: bool) -> None:
    if valid:
        assert parse_manifest(annotations=annotations).annotations == annotations
    else:
        with pytest.raises(MalformedDocument, match="annotation"):
            parse_manifest(annotations=annotations)


def test_text_is_limited() -> None:
    assert parse_manifest(text="x" * MAX_TEXT_CHARACTERS).text == "x" * MAX_TEXT_CHARACTERS
    with pytest.raises(MalformedDocument, match="text"):
        parse_manifest(text="x" * (MAX_TEXT_CHARACTERS + 1))


@pytest.mark.parametrize(
    "exactness",
    [
        None,
        "exact",
        {},
        {"class": "Exact"},
        {"class": "exact", "codec": None},
        {"class": "lossy"},
        {"class": "lossy", "codec": "x"},
        {"class": "lossy", "codec": "x", "error": 1},
        {"class": "lossy", "codec": None, "error": "x"},
        {"class": "lossy", "codec": "x", "error": "x", "more": 1},
    ],
    ids=repr,
)
def test_exactness_is_exact_or_lossy_with_its_measure(exactness: Any) -> None:
    with pytest.raises(MalformedDocument, match="exactness"):
        parse_manifest(exactness=exactness)


# Digests

BAD_DIGESTS: list[Any] = [
    "",
    "0" * 64,
    "sha256:",
    "sha256:" + "0" * 63,
    "sha256:" + "0" * 65,
    "sha256:" + "A" * 64,
    "SHA256:" + "0" * 64,
    "sha256: " + "0" * 64,
    "sha256:" + "0" * 64 + "\n",
    "sha256:" + "\u0660" * 64,
    "sha512:" + "0" * 64,
    "md5:" + "0" * 32,
    "sha256:0x" + "0" * 62,
    "x" * 10**6,
]


@pytest.mark.parametrize("text", BAD_DIGESTS, ids=lambda text: ascii(text)[:24])
def test_a_malformed_digest_is_refused(text: str) -> None:
    with pytest.raises(MalformedDigest) as caught:
        parse_digest(text, SHA256)
    assert len(caught.value.message) < 1000


def test_a_digest_of_the_other_algorithm_is_refused() -> None:
    assert parse_digest(SHA, SHA256) == parse_digest(BLAKE, BLAKE3) == bytes(32)
    with pytest.raises(MalformedDigest):
        parse_digest(SHA, BLAKE3)
    with pytest.raises(MalformedDigest):
        parse_digest(BLAKE, SHA256)


@pytest.mark.parametrize("bad", [*BAD_DIGESTS, None, 1, True, [], [SHA], {}], ids=lambda value: ascii(value)[:24])
def test_documents_with_bad_digests_are_refused(bad: Any) -> None:
    blocks = document(MANIFEST.data)["blocks"]
    manifests: list[dict[str, Any]] = [
        {"tokens": {"count": 40, "chunks": [bad]}},
        {"blocks": [[bad, SHA], *blocks[1:]]},
        {"blocks": [[SHA, bad], *blocks[1:]]},
    ]
    records: list[dict[str, Any]] = [
        {"key": bad},
        {"chunks": {**document(RECORDS[0].data)["chunks"], "full/k": [bad, bad]}},
    ]
    if bad is not None:
        manifests.append({"lineage": {"parent": bad}})
        records.append({"parent": bad})
    for fields in manifests:
        with pytest.raises((MalformedDigest, MalformedDocument)):
            parse_manifest(**fields)
    for fields in records:
        with pytest.raises((MalformedDigest, MalformedDocument)):
            parse_record(**fields)


def test_chunks_are_named_by_blake3_and_documents_by_sha256() -> None:
    with pytest.raises(MalformedDigest):
        parse_manifest(tokens={"count": 40, "chunks": [SHA]})
    with pytest.raises(MalformedDigest):
        parse_manifest(blocks=[[BLAKE, SHA]] * 3)
    with pytest.raises(MalformedDigest):
        parse_record(chunks={"full/k": [SHA, SHA]})


def test_a_chunks_digest_commits_to_dtype_and_shape() -> None:
    data = bytes(64)
    digests = {
        chunk_digest(data, "bfloat16", (1, 1, 2, 4, 4)),
        chunk_digest(data, "float16", (1, 1, 2, 4, 4)),
        chunk_digest(data, "bfloat16", (1, 2, 1, 4, 4)),
        chunk_digest(data, "bfloat16", (1, 1, 2, 4, 4, 1)),
        chunk_digest(data, "bfloat16", (11, 2, 4, 4)),
        chunk_digest(data + b"\0", "bfloat16", (1, 1, 2, 4, 4)),
    }
    assert len(digests) == 6


def test_altered_documents_do_not_match_their_digest() -> None:
    assert require_digest(MANIFEST.data, MANIFEST.id, "manifest") is MANIFEST.data
    with pytest.raises(DocumentCorrupt) as caught:
        require_digest(MANIFEST.data[:-1], MANIFEST.id, "manifest")
    assert caught.value.details == {"digest": MANIFEST.id, "found": sha256_digest(MANIFEST.data[:-1])}


# Counts and spans


@pytest.mark.parametrize("count", [0, -1, True, 1, 16, 32, 49, MAX_TOKENS, MAX_TOKENS + 1, 2**63 - 1])
def test_a_token_count_that_does_not_fit_the_blocks_is_refused(count: int) -> None:
    with pytest.raises(MalformedDocument):
        parse_manifest(tokens={"count": count, "chunks": None})


@pytest.mark.parametrize("chunks", [[], [BLAKE, BLAKE], {}, "x", 1])
def test_a_wrong_number_of_token_chunks_is_refused(chunks: Any) -> None:
    with pytest.raises(MalformedDocument):
        parse_manifest(tokens={"count": 40, "chunks": chunks})


@pytest.mark.parametrize("number", [0, 1, 2, 4, 100])
def test_a_wrong_number_of_blocks_is_refused(number: int) -> None:
    with pytest.raises(MalformedDocument, match=f"lists {number} blocks; 40 tokens make 3"):
        parse_manifest(blocks=[[SHA, SHA]] * number)


@pytest.mark.parametrize(
    "block", [[SHA], [SHA, SHA, SHA], {"key": SHA}, SHA, None, [[SHA], SHA]], ids=lambda b: str(b)[:20]
)
def test_a_block_is_a_key_and_a_digest(block: Any) -> None:
    with pytest.raises(MalformedDocument, match="not a block"):
        parse_manifest(blocks=[block] * 3)


@pytest.mark.parametrize(
    "records",
    [
        RECORDS[:2],
        RECORDS + RECORDS[:1],
        RECORDS[::-1],
        [RECORDS[0], RECORDS[0], RECORDS[2]],
        [RECORDS[1], RECORDS[0], RECORDS[2]],
        [],
    ],
    ids=["missing", "extra", "reversed", "twice", "swapped", "none"],
)
def test_records_that_are_not_those_listed_are_refused(records: list[BlockRecord]) -> None:
    with pytest.raises(MalformedDocument):
        MANIFEST.check_records(records)


@pytest.mark.parametrize(
    "order", [order for order in itertools.product(range(3), repeat=3) if order != (0, 1, 2)], ids=str
)
def test_records_in_any_order_but_their_own_are_refused(order: tuple[int, int, int]) -> None:
    records = [RECORDS[i] for i in order]
    with pytest.raises(MalformedDocument):
        with_records(records).check_records(records)


def test_a_record_of_other_bytes_under_a_listed_key_is_refused() -> None:
    altered = replace(RECORDS[1], chunks={**RECORDS[1].chunks, "full/k": (BLAKE, BLAKE)})
    with pytest.raises(MalformedDocument, match="not the one the manifest names") as caught:
        MANIFEST.check_records([RECORDS[0], altered, RECORDS[2]])
    assert caught.value.details["block_key"] == RECORDS[1].key


@pytest.mark.parametrize("parent", [None, RECORDS[1].key, SHA])
def test_a_record_chained_to_another_parent_is_refused(parent: str | None) -> None:
    records = [RECORDS[0], RECORDS[1], replace(RECORDS[2], parent=parent)]
    with pytest.raises(MalformedDocument):
        with_records(records).check_records(records) if parent != RECORDS[1].key else MANIFEST.check_records(
            records[:2]
        )


def test_blocks_that_end_before_or_after_the_tokens_are_refused() -> None:
    for stop in (39, 41, 48):
        step = Step(PREFILL, 32, stop)
        records = [RECORDS[0], RECORDS[1], replace(RECORDS[2], stop=stop, steps=(step,))]
        with pytest.raises(MalformedDocument, match="end at token"):
            with_records(records).check_records(records)


def test_a_partial_block_is_the_last() -> None:
    short = replace(RECORDS[1], stop=31, steps=(Step(PREFILL, 16, 31),))
    records = [RECORDS[0], short, RECORDS[2]]
    with pytest.raises(MalformedDocument, match="begins at 32; the one before it ends at 31"):
        with_records(records).check_records(records)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 17), (1, 16), (-16, 0), (16, 0), (8, 24), (2**26, 2**26 + 16), (2**62, 2**62 + 16), (0, 2**62)],
)
def test_a_span_that_is_no_block_is_refused(start: int, stop: int) -> None:
    record = replace(RECORDS[0], start=start, stop=stop, parent=None if start == 0 else SHA)
    with pytest.raises(MalformedDocument, match="no block of 16 tokens"):
        record.check(LAYOUT)


@pytest.mark.parametrize(("start", "parent"), [(0, SHA), (16, None)])
def test_the_first_block_and_no_other_has_no_parent(start: int, parent: str | None) -> None:
    with pytest.raises(MalformedDocument, match="parent"):
        replace(RECORDS[0], start=start, stop=start + 16, parent=parent).check(LAYOUT)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [[PREFILL, 16, 31]],
        [[PREFILL, 17, 32]],
        [[PREFILL, 0, 32]],
        [[PREFILL, 16, 33]],
        [[PREFILL, 32, 48]],
        [[PREFILL, 0, 16]],
        [[DECODE, 16, 2**62]],
        [[DECODE, 0, 2**62]],
        [[PREFILL, 16, 24], [PREFILL, 25, 32]],
        [[PREFILL, 16, 24], [PREFILL, 23, 32]],
        [[PREFILL, 24, 32], [PREFILL, 16, 24]],
        [[DECODE, 16, 20], [DECODE, 20, 32]],
        [[PREFILL, 16, 32], [DECODE, 32, 33]],
        [[DECODE, 15, 32]],
    ],
    ids=str,
)
def test_steps_that_do_not_cover_the_span_in_normal_form_are_refused(steps: list[list[Any]]) -> None:
    record = parse_record(1, steps=steps)
    with pytest.raises(MalformedDocument, match="step"):
        record.check(LAYOUT)


@pytest.mark.parametrize("field", ["start", "stop"])
def test_a_truth_value_is_no_position(field: str) -> None:
    with pytest.raises(MalformedDocument):
        parse_record(**{field: field == "stop"})


@pytest.mark.parametrize(
    "chunks",
    [
        {},
        {"full/k": [BLAKE]},
        {name: [*digests, BLAKE] for name, digests in RECORDS[0].chunks.items()},
        {name: list(digests)[1:] for name, digests in RECORDS[0].chunks.items()},
        {**RECORDS[0].chunks, "full/x": []},
        {**RECORDS[0].chunks, "full/x": [BLAKE]},
        {name: [BLAKE] * 10_000 for name in RECORDS[0].chunks},
    ],
    ids=lambda chunks: str(len(chunks)),
)
def test_a_wrong_number_of_chunks_is_refused(chunks: dict[str, list[str]]) -> None:
    with pytest.raises(MalformedDocument, match="its layout has"):
        parse_record(chunks=chunks).check(LAYOUT)


# Token ids


@given(st.lists(st.integers(0, MAX_TOKEN_ID), max_size=50))
def test_token_ids_survive_their_encoding(tokens: list[int]) -> None:
    encoded = encode_tokens(tokens)
    assert encoded == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert decode_tokens(encoded) == tokens


@pytest.mark.parametrize(
    "token", [-1, MAX_TOKEN_ID + 1, 2**32, True, 1.0, "1", None, 10**5000], ids=lambda t: str(type(t))
)
def test_what_is_no_token_id_is_refused(token: Any) -> None:
    with pytest.raises(InvalidTokens):
        encode_tokens([1, token])


def test_the_last_token_chunk_is_padded_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repo_service.domain.tokens.TOKEN_CHUNK", 16)
    chunks = token_chunks(TOKENS)
    assert len(chunks) == token_chunk_count(len(TOKENS)) == 3
    assert b"".join(data for _, data in chunks) == encode_tokens(TOKENS).ljust(192, b"\0")
    assert [digest for digest, _ in chunks] == [chunk_digest(data, "uint32", (16,)) for _, data in chunks]


@settings(deadline=None)
@given(st.integers(0, 39), st.integers(0, MAX_TOKEN_ID))
def test_keys_stand_for_the_token_ids(position: int, token: int) -> None:
    tokens = [*TOKENS[:position], token, *TOKENS[position + 1 :]]
    if tokens == TOKENS:
        MANIFEST.check_keys(RECORDS, tokens)
        return
    with pytest.raises(MalformedDocument, match=f"key of block {position // 16 * 16} to"):
        MANIFEST.check_keys(RECORDS, tokens)


@pytest.mark.parametrize("tokens", [[], TOKENS[:-1], [*TOKENS, 0]])
def test_another_number_of_token_ids_is_refused(tokens: list[int]) -> None:
    with pytest.raises(MalformedDocument, match=f"{len(tokens)} token ids for 40"):
        MANIFEST.check_keys(RECORDS, tokens)


# Block keys


@settings(deadline=None)
@given(tokens_lists, tokens_lists, st.integers(0, 80), st.sampled_from([1, 4, 16]))
def test_equal_prefixes_share_keys_and_nothing_after_the_first_difference_does(
    one: list[int], end: list[int], common: int, size: int
) -> None:
    two = one[:common] + end
    keys = [block_keys(SHA, tokens, canonical_steps(0, len(tokens), size), size) for tokens in (one, two)]
    for i, (a, b) in enumerate(zip(*keys, strict=False)):
        assert (a == b) == (one[: (i + 1) * size] == two[: (i + 1) * size])
    assert len({*keys[0], *keys[1]}) == len(keys[0]) + len(keys[1]) - sum(a == b for a, b in zip(*keys, strict=False))


def test_a_block_key_depends_on_each_of_its_inputs() -> None:
    steps = [Step(PREFILL, 16, 20)]
    other = "sha256:" + "1" * 64
    keys = [
        block_key(SHA, SHA, [1, 2, 3, 4], steps),
        block_key(other, SHA, [1, 2, 3, 4], steps),
        block_key(SHA, other, [1, 2, 3, 4], steps),
        block_key(SHA, None, [1, 2, 3, 4], steps),
        block_key(SHA, SHA, [1, 2, 4, 3], steps),
        block_key(SHA, SHA, [1, 2, 3], steps),
        block_key(SHA, SHA, [1, 2, 3, 4, 0], steps),
        block_key(SHA, SHA, [1, 2, 3, 4], [Step(DECODE, 16, 20)]),
        block_key(SHA, SHA, [1, 2, 3, 4], [Step(PREFILL, 32, 36)]),
        block_key(SHA, SHA, [1, 2, 3, 4], [Step(PREFILL, 16, 18), Step(PREFILL, 18, 20)]),
        block_key(SHA, SHA, [1, 2, 3, 4], [Step(PREFILL, 16, 19), Step(DECODE, 19, 20)]),
    ]
    assert len(set(keys)) == len(keys)


_KEYS = """
import json, sys
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.record import block_keys
from repo_service.domain.schedule import Step
sections, tokens, schedule = json.load(sys.stdin)
fingerprint = Fingerprint(sections)
keys = block_keys(fingerprint.id, tokens, [Step.from_json(s) for s in schedule], 16)
print(json.dumps([fingerprint.id, fingerprint.model_id, *keys]))
"""


def keys_of(python: str, hash_seed: str) -> list[str]:
    run = subprocess.run(
        [python, "-c", _KEYS],
        input=json.dumps([MANIFEST.fingerprint.sections, TOKENS, [s.to_json() for r in RECORDS for s in r.steps]]),
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    keys: list[str] = json.loads(run.stdout)
    return keys


EXPECTED = [MANIFEST.fingerprint.id, MANIFEST.fingerprint.model_id, *(record.key for record in RECORDS)]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295", "random"])
def test_lmcache_1139_keys_do_not_depend_on_the_process(hash_seed: str) -> None:
    assert keys_of(sys.executable, hash_seed) == EXPECTED


def other_python(version: str) -> str | None:
    """An interpreter of another version that has what the domain imports."""
    named = os.environ.get("KVGRAFT_TEST_PYTHONS", "").split(os.pathsep)
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in [*named, *map(str, pyenv), shutil.which(f"python{version}")]:
        if not candidate or not Path(candidate).exists():
            continue
        probe = "import sys, blake3, typing_extensions; print('%d.%d' % sys.version_info[:2])"
        run = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
        if run.returncode == 0 and run.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_lmcache_1139_keys_do_not_depend_on_the_python_version(version: str) -> None:
    python = sys.executable if version == f"{sys.version_info[0]}.{sys.version_info[1]}" else other_python(version)
    if python is None:
        pytest.skip(f"no Python {version} with blake3 and typing_extensions: name one in KVGRAFT_TEST_PYTHONS")
    assert keys_of(python, "random") == EXPECTED


# Hostile documents

STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    15,
    16,
    17,
    2**31,
    2**53,
    2**63 - 1,
    "",
    "x",
    "full/k",
    "prefill",
    "decode",
    "exact",
    SHA,
    BLAKE,
    "../../etc/passwd",
    "\0",
    "\u202e",
    [],
    {},
    [[]],
    [None] * 100,
    {"": {}},
]


def altered_bytes(data: bytes, choice: random.Random) -> bytes:
    i, j = sorted(choice.choices(range(len(data)), k=2))
    return choice.choice(
        [
            lambda: data[:i] + bytes([data[i] ^ 1 << choice.randrange(8)]) + data[i + 1 :],
            lambda: data[:i] + data[j:],
            lambda: data[:i],
            lambda: data[:i] + data[i:j] + data[i:],
            lambda: data[:i] + choice.randbytes(choice.randrange(1, 9)) + data[i:],
            lambda: data[:i] + choice.choice([b"[", b"{", b'"', b"\\u0000", b"1e9", b"-", b"0", b"\xf0"]) + data[j:],
        ]
    )()


def altered_value(data: bytes, choice: random.Random) -> bytes:
    """The document with one value anywhere in it replaced, removed, doubled or taken from elsewhere."""
    whole = document(data)
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [whole]
    while pending:
        container = pending.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            places.append((container, key))
            if isinstance(container[key], (dict, list)):
                pending.append(container[key])
    container, key = choice.choice(places)
    action = choice.randrange(4)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(choice.randrange(len(container) + 1), container[key])
    elif action == 2:
        other, other_key = choice.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    else:
        container[key] = choice.choice(STRANGE)
    return canonical_json(whole)


@pytest.mark.parametrize("alter", [altered_bytes, altered_value])
def test_ten_thousand_hostile_documents_give_our_errors_only(alter: Callable[[bytes, random.Random], bytes]) -> None:
    choice = random.Random(1)
    read = 0
    refused: list[KvgraftError] = []
    for number in range(5000):
        index = number % 4
        data = alter(MANIFEST.data if index == 3 else RECORDS[index].data, choice)
        try:
            if index == 3:
                manifest, records = Manifest.parse(data), RECORDS
                assert manifest.data == data
            else:
                records = [*RECORDS[:index], BlockRecord.parse(data), *RECORDS[index + 1 :]]
                assert records[index].data == data
                manifest = with_records(records)
            read += 1
            manifest.check_records(records)
            manifest.check_keys(records, TOKENS)
        except KvgraftError as error:
            refused.append(error)
        else:
            # What is whole, in order and keyed as before has the state of before, or names other chunks.
            assert manifest.fingerprint == MANIFEST.fingerprint
            assert [r.key for r in records] == [r.key for r in RECORDS]
    assert read > 200
    assert len(refused) > 4000
    for error in refused:
        canonical_json(error.to_json())
        assert len(error.message.encode()) < 4000


def test_a_layout_in_a_manifest_is_checked() -> None:
    sections = copy.deepcopy(MANIFEST.fingerprint.sections)
    sections["state"]["groups"][0]["arrays"][0]["chunk_heads"] = 3
    with pytest.raises(MalformedDocument):
        parse_manifest(fingerprint=sections)
    with pytest.raises(MalformedDocument):
        Layout.of(fingerprint(state={"groups": sections["state"]["groups"]}))
