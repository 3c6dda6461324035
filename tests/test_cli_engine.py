"""``kvgraft deposit``, ``match`` and ``verify`` on a small model of random weights."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repo_service.cli import errors
from repo_service.cli.main import main
from repo_service.client import open_repository
from repo_service.domain.digest import chunk_digest
from repo_service.services.documents import chunk_key

TEXT = "A tide mill grinds grain with no fuel and no wind. " * 8
BLOCK = 64

Kvgraft = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def kvgraft(run_json: Kvgraft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_directory: Path) -> Kvgraft:
    """Runs a command on the model and a repository."""
    monkeypatch.setenv("KVGRAFT_REPO", (tmp_path / "repo").as_uri())
    (tmp_path / "text").write_text(TEXT)

    def run(command: str, *args: object) -> tuple[int, dict[str, Any]]:
        of_model = () if "--fingerprint" in args or "--model" in args else ("--model", model_directory)
        return run_json(command, *args, *of_model)

    return run


@pytest.fixture
def deposited(kvgraft: Kvgraft, tmp_path: Path) -> dict[str, Any]:
    """The artifact of the text."""
    code, info = kvgraft("deposit", tmp_path / "text", "--tag", "mill", "--block-tokens", BLOCK)
    assert code == 0
    return info


def publish_altered(root: Path, ref: str, namespace: str) -> None:
    """Publish an artifact with one bit of its second block's state flipped: whole, but not what the model gives."""
    with open_repository(root.as_uri()) as repository:
        manifest = repository.manifest(ref, "default")
        records = repository.records(manifest, "default")
        specs = manifest.stored_chunks(records)
        contents = {digest: bytearray(spec.size) for digest, spec in specs.items()}
        for digest, out in contents.items():
            repository.read_chunk(manifest.id, "default", digest, specs[digest], memoryview(out))
        name, digests = next(iter(records[1].chunks.items()))
        data, spec = bytearray(contents[digests[0]]), specs[digests[0]]
        data[5] ^= 1
        altered = chunk_digest(data, spec.dtype, spec.shape)
        contents[altered] = data
        records[1] = dataclasses.replace(records[1], chunks={**records[1].chunks, name: (altered, *digests[1:])})
        blocks = tuple((record.key, record.digest) for record in records)
        with repository.begin_push(manifest.fingerprint, namespace) as push:
            for digest in push.offer(records) + push.offer_tokens(manifest.token_count, manifest.tokens or ()):
                push.put(digest, contents[digest])
            push.commit(dataclasses.replace(manifest, blocks=blocks))


def test_a_deposited_text_is_found_and_verified(kvgraft: Kvgraft, deposited: dict[str, Any]) -> None:
    assert deposited["tags"] == ["mill"]
    assert deposited["block_tokens"] == BLOCK
    code, found = kvgraft("match", "--text", TEXT + "And more.", "--block-tokens", BLOCK)
    whole = deposited["token_count"] // BLOCK * BLOCK
    assert (code, found["match"]) == (0, {"artifact_id": deposited["id"], "blocks": whole // BLOCK, "tokens": whole})
    code, report = kvgraft("verify", "mill", "--samples", 4)
    assert (code, report["exact"]) == (0, True)
    assert [sample["equal"] for sample in report["samples"]] == [True] * 4
    assert all(block["equal"] for block in report["blocks"])
    assert report["inexact"] == []


def test_a_paged_deposit_is_verified_paged_and_resident(
    kvgraft: Kvgraft,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model_directory: Path,
) -> None:
    paged = ("--attention", "kvgraft_paged_256", "--device-pages", 1)
    assert kvgraft("deposit", tmp_path / "text", "--tag", "mill", *paged)[0] == 0
    for pages in ((), ("--device-pages", 2)):
        code, report = kvgraft("verify", "mill", "--samples", 2, *pages)
        assert (code, report["exact"]) == (0, True)
    code, error = kvgraft("deposit", tmp_path / "text", "--device-pages", 2)
    assert (code, error["code"]) == (errors.USAGE, "invalid_input")
    assert "paged_attention()" in error["message"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["verify", "mill", "--model", str(model_directory), "--samples", "2", "--device-pages", "2"]) == 0
    assert "of pages read into" in capsys.readouterr().err


def test_inexact_ways_are_measured_and_are_no_failure(kvgraft: Kvgraft, deposited: dict[str, Any]) -> None:
    code, report = kvgraft("verify", deposited["id"], "--samples", 2, "--inexact")
    assert (code, report["exact"]) == (0, True)
    assert [way["name"] for way in report["inexact"]] == ["full prefill", "moved by 8", "moved by 128", "moved by 1024"]
    assert not report["inexact"][1]["exact"]


def test_state_that_is_not_the_models_is_reported_with_its_block(
    kvgraft: Kvgraft,
    deposited: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model_directory: Path,
) -> None:
    publish_altered(tmp_path / "repo", deposited["id"], "other")
    altered = json.loads(_run(capsys, "ls", "--namespace", "other", "--json"))["items"][0]["id"]
    code, report = kvgraft("verify", altered, "--namespace", "other", "--samples", 2)
    assert (code, report["exact"]) == (errors.INEXACT, False)
    assert [block["differing"] for block in report["blocks"] if not block["equal"]] == [["full/k[0]"]]
    assert (
        kvgraft("verify", altered, "--namespace", "other", "--storage-only", "--model", model_directory)[0]
        == errors.USAGE
    )
    text = _run(capsys, "verify", altered, "--namespace", "other", "--model", str(model_directory), "--samples", "2")
    assert "block 64 to 128 differs in full/k[0]" in text
    assert text.endswith("NOT EXACT\n")


def _run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    main(args)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "field"),
    [(("--dtype", "bfloat16"), "model.dtype"), (("--attention", "eager"), "numerics.attention")],
)
def test_another_setting_than_the_artifacts_is_a_mismatch_that_names_the_field(
    kvgraft: Kvgraft, deposited: dict[str, Any], option: tuple[str, str], field: str
) -> None:
    code, error = kvgraft("verify", deposited["id"], *option)
    assert (code, error["code"]) == (errors.MISMATCH, "fingerprint_mismatch")
    assert field in error["details"]["fields"]


def test_an_altered_chunk_ends_verification(kvgraft: Kvgraft, deposited: dict[str, Any], tmp_path: Path) -> None:
    with open_repository((tmp_path / "repo").as_uri()) as repository:
        manifest = repository.manifest(deposited["id"], "default")
        digest = repository.records(manifest, "default")[0].chunks["full/v"][0]
    path = tmp_path / "repo" / chunk_key(digest)
    path.write_bytes(bytes([path.read_bytes()[0] ^ 128]) + path.read_bytes()[1:])
    code, error = kvgraft("verify", "mill")
    assert (code, error["code"], error["details"]["digest"]) == (errors.INEXACT, "chunk_corrupt", digest)


def test_what_a_deposit_publishes_is_chosen_by_options(kvgraft: Kvgraft, tmp_path: Path) -> None:
    text, tokens = tmp_path / "text", tmp_path / "tokens"
    tokens.write_text(" ".join(map(str, range(3, 103))))
    _, indexed = kvgraft("deposit", text, "--index-text", "--annotation", "a=1", "--annotation", "b=x=y")
    assert indexed["annotations"] == {"a": "1", "b": "x=y"}
    _, cut = kvgraft("deposit", text, "--max-tokens", 70, "--text", "short")
    assert cut["token_count"] == 70
    code, private = kvgraft("deposit", "--tokens-file", tokens, "--private-tokens")
    assert (code, private["private_tokens"], private["token_count"]) == (0, True, 100)
    assert kvgraft("verify", private["id"], "--samples", 2)[1]["code"] == "invalid_tokens"
    assert kvgraft("verify", private["id"], "--samples", 2, "--tokens-file", tokens)[1]["exact"] is True
    code, error = kvgraft("deposit", text, "--index-text", "--private-tokens")
    assert (code, error["code"]) == (errors.USAGE, "invalid_input")
    with open_repository((tmp_path / "repo").as_uri()) as repository:
        texts = {info["id"]: repository.manifest(info["id"], "default").text for info in (indexed, cut, private)}
    assert list(texts.values()) == [TEXT, "short", None]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("", "invalid_tokens"),
        ("[3, 512]", "invalid_tokens"),
        ("[-1]", "invalid_tokens"),
        ("3 " * 2049, "context_too_long"),
    ],
)
def test_tokens_that_the_model_can_not_take_are_refused(
    kvgraft: Kvgraft, tmp_path: Path, content: str, code: str
) -> None:
    (tmp_path / "tokens").write_text(content)
    found, error = kvgraft("deposit", "--tokens-file", tmp_path / "tokens")
    assert (found, error["code"]) == (errors.USAGE, code)


def test_a_model_that_can_not_be_had_is_an_error(kvgraft: Kvgraft, tmp_path: Path, model_directory: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model_directory.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[:100])
    for name in "nowhere/at-all", tmp_path, damaged:
        code, error = kvgraft("deposit", tmp_path / "text", "--model", name)
        assert (code, error["code"]) == (errors.MISSING, "model_unavailable")
        assert str(name) in error["message"]
    code, error = kvgraft("deposit", tmp_path / "text", "--device", "abacus")
    assert (code, error["code"]) == (errors.MISSING, "model_unavailable")
