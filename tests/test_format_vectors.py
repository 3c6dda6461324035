"""The golden vectors of docs/format.md, against the code and against a second implementation of that page."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numcodecs
import pytest
from blake3 import blake3
from synthetic import artifact
from test_zarr_view import TOKENS, push

from repo_service.domain.canonical import canonical_json, frame
from repo_service.domain.digest import chunk_digest
from repo_service.domain.errors import Divergence
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.frame import decode_chunk
from repo_service.domain.layout import ArrayLayout, ChunkSpec, LayerGroup, Layout
from repo_service.domain.manifest import Manifest
from repo_service.domain.policy import Policy
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.schedule import Step, split_by_block
from repo_service.domain.tokens import encode_tokens, token_chunks
from repo_service.services.opening import open_local

FORMAT = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
VECTORS = json.loads(re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL)[-1])
FINGERPRINT = Fingerprint(VECTORS["fingerprint"]["sections"])


@pytest.mark.parametrize("vector", VECTORS["canonical_json"])
def test_canonical_json(vector: dict[str, Any]) -> None:
    assert canonical_json(vector["value"]) == vector["text"].encode()


@pytest.mark.parametrize("vector", VECTORS["frame"])
def test_framing(vector: dict[str, Any]) -> None:
    assert frame(vector["value"]) == vector["framed"].encode() == reframed(vector["value"])


@pytest.mark.parametrize("vector", VECTORS["chunks"])
def test_chunk_digests(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["bytes"])
    assert chunk_digest(data, vector["dtype"], vector["shape"]) == vector["digest"]
    head = reframed(["kvgraft.chunk.v1", vector["dtype"], vector["shape"]])
    assert vector["digest"] == f"blake3:{blake3(head + data).hexdigest()}"


@pytest.mark.parametrize("vector", VECTORS["first_stored"])
def test_what_an_artifact_in_part_stores(vector: dict[str, Any]) -> None:
    window, resume_from, size = vector["window"], vector["resume_from"], vector["block_tokens"]
    kind = "full" if window is None else "sliding"
    group = LayerGroup("g", kind, (0,), window, (ArrayLayout("k", "float32", 1, 1, 1, size, 1, 1),))
    assert Layout(size, (group,)).first_stored(resume_from) == {"g/k": vector["block"]}
    needed = 0 if window is None else resume_from - max(1, window - 1)
    assert vector["block"] == next(block for block in range(resume_from) if (block + 1) * size > needed)


@pytest.mark.parametrize("vector", VECTORS["frames"])
def test_frames(vector: dict[str, Any]) -> None:
    header, payload = vector["header"].encode(), bytes.fromhex(vector["payload"])
    frame = b"kvgchunk" + struct.pack("<I", len(header)) + header + payload
    spec = ChunkSpec(vector["dtype"], tuple(vector["shape"]))
    out = bytearray(spec.size)
    decode_chunk(memoryview(frame), vector["digest"], spec, memoryview(out))
    fields = json.loads(header)
    plain = payload if fields["codec"] == "none" else numcodecs.Blosc().decode(payload)
    assert out == plain
    assert chunk_digest(plain, spec.dtype, spec.shape) == vector["digest"]
    assert (fields["size"], fields["stored_size"]) == (len(plain), len(payload))
    assert fields["stored_digest"] == f"blake3:{blake3(payload).hexdigest()}"


def test_fingerprint_ids() -> None:
    vector = VECTORS["fingerprint"]
    sections = vector["sections"]
    model = {name: sections[name] for name in ("model", "positions", "state")}
    assert FINGERPRINT.id == vector["fingerprint_id"] == sha256(reframed(["kvgraft.fingerprint.v1", sections]))
    assert FINGERPRINT.model_id == vector["model_id"] == sha256(reframed(["kvgraft.model.v1", model]))


@pytest.mark.parametrize("vector", VECTORS["block_keys"])
def test_block_keys(vector: dict[str, Any]) -> None:
    schedule = [Step.from_json(step) for step in vector["schedule"]]
    blocks = vector["blocks"]
    assert block_keys(FINGERPRINT.id, vector["tokens"], schedule, 4) == [block["key"] for block in blocks]
    normal = [[step.to_json() for step in steps] for steps in split_by_block(schedule, 4)]
    assert normal == [block["steps"] for block in blocks]
    assert encode_tokens(vector["tokens"]).hex() == "".join(block["tokens"] for block in blocks)
    for block in blocks:
        tokens = bytes.fromhex(block["tokens"])
        framed = reframed(["kvgraft.block.v1", FINGERPRINT.id, block["parent"], tokens, block["steps"]])
        assert block["key"] == sha256(framed)


def test_records_manifest_and_artifact_id() -> None:
    vector = VECTORS["artifact"]
    records = []
    for record in vector["records"]:
        data = canonical_json(record["document"])
        assert record["digest"] == sha256(data) == BlockRecord.parse(data).digest
        records.append(BlockRecord.parse(data))
    manifest = Manifest.parse(canonical_json(vector["manifest"]))
    assert manifest.id == vector["artifact_id"] == sha256(manifest.data)
    tokens = VECTORS["block_keys"][0]["tokens"]
    manifest.check_records(records)
    manifest.check_keys(records, tokens)
    assert manifest.fingerprint == FINGERPRINT
    assert manifest.tokens == tuple(digest for digest, _ in token_chunks(tokens))
    used = [digest for record in records for digests in record.chunks.values() for digest in digests]
    assert [*used, *manifest.tokens] == [chunk["digest"] for chunk in VECTORS["chunks"]]


def test_the_framed_example_in_the_text_is_the_first_block_key() -> None:
    lines = re.search(r"^    l5:.*?\n\n", FORMAT, re.DOTALL | re.MULTILINE)
    assert lines is not None
    text = "".join(line.strip() for line in lines[0].splitlines())
    head, tokens, tail = re.split(r"[<>]", text)
    framed = head.encode() + bytes.fromhex(tokens) + tail.encode()
    assert VECTORS["block_keys"][0]["blocks"][0]["key"] == sha256(framed)


def test_a_store_holds_the_keys_of_the_page_and_no_others(tmp_path: Path) -> None:
    with open_local(f"file://{tmp_path}/repository") as repository:
        manifest = push(repository, artifact(TOKENS), "team-a")
        repository.set_tag("team-a", "latest", manifest.id)
        with pytest.raises(Divergence):
            push(repository, artifact(TOKENS, seed=1), "team-a")
        repository.set_policy("team-a", Policy(quota_bytes=2**30))
        tag = tmp_path / "repository" / "tags" / "team-a" / "latest.json"
        tag.write_bytes(b"damaged")
        assert [item.healed for item in repository.scrub().damage] == [True]
        found = {str(p.relative_to(tmp_path / "repository")) for p in tmp_path.rglob("*") if p.is_file()}
    table = re.search(r"^## 12\..*?^## 13\.", FORMAT, re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = re.findall(r"^\| `([^`]+)` \|", table[0], re.MULTILINE)
    holes = {"<2 hex>": "[0-9a-f]{2}", "<62 hex>": "[0-9a-f]{62}", "<64 hex>": "[0-9a-f]{64}", "<id>": "[0-9a-f]{64}"}
    for row in rows:
        pattern = re.escape(row).replace("\\ ", " ")
        for hole, expression in {**holes, "<namespace>": "team-a", "<name>": "latest", "<key>": ".+"}.items():
            pattern = pattern.replace(hole, expression)
        matched = {key for key in found if re.fullmatch(pattern, key)}
        # An index elsewhere, which index.json names, and uploads are for tests of their own.
        assert matched or row in {"tmp/", "index.json", "uploads/<push>/<chunk>"}, row
        found -= matched
    assert {key for key in found if not key.startswith("index.sqlite-")} == set()


_KEYS = """
import json, sys
from repo_service.domain.record import block_keys
from repo_service.domain.schedule import Step
fingerprint_id, tokens, schedule = json.load(sys.stdin)
print(json.dumps(block_keys(fingerprint_id, tokens, [Step.from_json(s) for s in schedule], 4)))
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_lmcache_1139_and_2136_keys_are_equal_in_every_process(hash_seed: str) -> None:
    vector = VECTORS["block_keys"][0]
    run = subprocess.run(
        [sys.executable, "-c", _KEYS],
        input=json.dumps([FINGERPRINT.id, vector["tokens"], vector["schedule"]]),
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(run.stdout) == [block["key"] for block in vector["blocks"]]


def reframed(value: Any) -> bytes:
    """Section 2 of the page, written from its text."""
    if value is None or isinstance(value, bool):
        return {None: b"n", True: b"t", False: b"f"}[value]
    if isinstance(value, list):
        return f"l{len(value)}:".encode() + b"".join(map(reframed, value))
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: [ord(c) for c in pair[0]])
        return f"d{len(value)}:".encode() + b"".join(reframed(part) for pair in pairs for part in pair)
    tag = {int: "i", str: "s", bytes: "b"}[type(value)]
    data = value if isinstance(value, bytes) else str(value).encode()
    return f"{tag}{len(data)}:".encode() + data


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
