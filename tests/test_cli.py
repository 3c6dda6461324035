"""``kvgraft``: every command's result, its JSON, its exit code, and its errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from synthetic import artifact, fingerprint
from test_cli_docs import flattened
from typer.main import get_command

from repo_service.cli import browse, errors, options, output
from repo_service.cli.main import PLUGIN_GROUP, application, main
from repo_service.client import open_repository
from repo_service.domain.errors import Divergence, KvgraftError, error_types
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.views import ArtifactInfo, ArtifactQuery

COMMANDS = [
    "demo",
    "serve",
    "deposit",
    "push",
    "pull",
    "mirror",
    "ls",
    "show",
    "query",
    "match",
    "verify",
    "export",
    "import",
    "tag",
    "rm",
    "reindex",
    "stats",
    "gc",
    "scrub",
    "retain",
    "token create",
    "token ls",
    "token revoke",
    "migrate",
    "cache",
    "library add",
    "library list",
    "ask",
    "joint",
]
ESCAPE = "\x1b[31m"


@dataclass
class Result:
    """What a command wrote, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The result, which must be all there is on standard output."""
        assert self.err == ""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must be all there is on standard error."""
        assert self.out == ""
        error = json.loads(self.err)["error"]
        assert sorted(error) == ["code", "details", "message"]
        return dict(error)


Kvgraft = Callable[..., Result]


@pytest.fixture
def kvgraft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kvgraft:
    """Runs a command in this process, with nothing set but the repository ``repo`` in ``tmp_path``."""
    for name in [name for name in os.environ if name.startswith("KVGRAFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVGRAFT_REPO", url(tmp_path / "repo"))
    monkeypatch.setenv("KVGRAFT_CACHE_DIR", str(tmp_path / "cache"))

    def run(*args: object) -> Result:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ArtifactInfo]:
    """A repository with one artifact, to copy."""
    root = tmp_path_factory.mktemp("pattern") / "repo"
    made = artifact(range(100), text="a tide mill", annotations={"source": f"mill{ESCAPE}"})
    return root, publish(root, *made, tag="first")


@pytest.fixture
def first(pattern: tuple[Path, ArtifactInfo], tmp_path: Path) -> ArtifactInfo:
    """An artifact of 100 tokens, tagged ``first``, in the repository."""
    root, info = pattern
    shutil.copytree(root, tmp_path / "repo")
    return info


@pytest.fixture
def second(first: ArtifactInfo, tmp_path: Path) -> ArtifactInfo:  # noqa: ARG001
    """An artifact of 40 tokens, 32 of which are those of the first one."""
    return publish(tmp_path / "repo", *artifact([*range(32), *range(900, 908)]), tag="second")


def url(path: Path) -> str:
    return path.as_uri()


def publish(
    root: Path, manifest: Manifest, records: list[BlockRecord], chunks: dict[str, bytes], tag: str | None = None
) -> ArtifactInfo:
    with open_repository(url(root)) as repository:
        with repository.begin_push(manifest.fingerprint, "default") as push:
            missing = push.offer(records)
            if manifest.tokens is not None:
                missing += push.offer_tokens(manifest.token_count, manifest.tokens)
            for digest in missing:
                push.put(digest, chunks[digest])
            info = push.commit(manifest)
        if tag is not None:
            repository.set_tag("default", tag, info.id)
        return repository.artifact(info.id, "default")


def process(*args: str, **more: Any) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "repo_service.cli", *args]
    # Whatever runs the tests in the background may have them ignore interrupts, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    finally:
        signal.signal(signal.SIGINT, before)


def script(text: str) -> str:
    """Standard output of a Python script that must succeed."""
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout


# The commands as a whole


def test_every_command_has_json_output_and_an_example() -> None:
    commands = dict(flattened(get_command(application())))
    assert sorted(commands) == sorted(COMMANDS)
    for name in COMMANDS:
        flags = {flag for parameter in commands[name].params for flag in parameter.opts}
        assert "--json" in flags, name
        assert f"Example: kvgraft {name} " in commands[name].epilog, name


def test_help_names_every_command_and_exit_code(kvgraft: Kvgraft) -> None:
    result = kvgraft("--help")
    assert result.code == 0
    assert all(f"\n  {name.split()[0]} " in result.out for name in COMMANDS)
    assert all(f"{code}  {meaning}\n" in result.out for code, meaning in errors.EXIT_CODES.items())


def test_help_loads_no_engine_and_no_service() -> None:
    heavy = ("torch", "transformers", "sqlalchemy", "fastapi", "uvicorn", "zarr", "numpy")
    found = script(
        f"import sys\nfrom repo_service.cli.main import main\nmain(['deposit', '--help'])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert found.splitlines()[-1] == "[]"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_an_engine_its_commands_are_listed_and_say_what_to_install(missing: str) -> None:
    found = script(
        f"import sys\nsys.modules[{missing!r}] = None\nfrom repo_service.cli.main import main\nmain(['--help'])\n"
        f"sys.stderr = sys.stdout\n"
        f"for args in ['deposit', '-', '--repo', 'memory:'], ['demo']:\n"
        f"    print(main([*args, '--json', *(['--model', 'smollm2'] if args[0] == 'deposit' else [])]))"
    )
    assert all(f"\n  {name.split()[0]} " in found for name in COMMANDS)
    *_, deposit_error, deposit_code, demo_error, demo_code = found.splitlines()
    assert deposit_code == demo_code == str(errors.MISSING)
    for line in deposit_error, demo_error:
        error = json.loads(line)["error"]
        assert error["code"] == "engine_missing"
        assert "kvgraft[engine]" in error["message"]


def test_an_adapter_that_can_not_be_loaded_takes_no_other_command_away(
    kvgraft: Kvgraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint("broken", "nowhere.at_all:register", PLUGIN_GROUP)
    monkeypatch.setattr("repo_service.cli.main.entry_points", lambda **_: [broken])
    result = kvgraft("ls", "--help")
    assert result.code == 0
    assert result.err == "kvgraft: the commands of nowhere.at_all:register can't be loaded: No module named 'nowhere'\n"


def test_no_command_prints_help_and_is_a_mistake(kvgraft: Kvgraft) -> None:
    result = kvgraft()
    assert result.code == errors.USAGE
    assert "Usage: kvgraft" in result.out


def test_every_error_of_the_library_has_an_exit_code_of_its_own_kind(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {code: errors.report(kind("why", value=1), as_json=True) for code, kind in error_types().items()}
    assert [code for code, exit_code in codes.items() if exit_code == errors.INTERNAL] == [KvgraftError.code]
    assert set(codes.values()) <= set(errors.EXIT_CODES)
    capsys.readouterr()


# Errors


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["ls", "--bogus"], errors.USAGE, "usage"),
        (["bogus"], errors.USAGE, "usage"),
        (["show"], errors.USAGE, "usage"),
        (["ls", "--limit", "0"], errors.USAGE, "usage"),
        (["query", "--min-tokens", "-1"], errors.USAGE, "invalid_input"),
        (["query", "--covers", "9"], errors.USAGE, "invalid_input"),
        (["query", "--token-prefix", "1,x"], errors.USAGE, "invalid_input"),
        (["query", "--created-after", "yesterday"], errors.USAGE, "invalid_input"),
        (["query", "--annotation", "source"], errors.USAGE, "invalid_input"),
        (["query", "--fingerprint", "sha256:12"], errors.USAGE, "malformed_digest"),
        (["query", "--cursor", "nonsense"], errors.USAGE, "malformed_request"),
        (["query", "--text", "word " * 65], errors.USAGE, "malformed_request"),
        (["ls", "--repo", "ftp://somewhere"], errors.USAGE, "malformed_url"),
        (["ls", "--namespace", "Not A Name"], errors.USAGE, "malformed_name"),
        (["show", "sha256:12"], errors.USAGE, "malformed_name"),
        (["tag"], errors.USAGE, "invalid_input"),
        (["tag", "first"], errors.USAGE, "invalid_input"),
        (["tag", "first", "new", "--list"], errors.USAGE, "invalid_input"),
        (["tag", "first", "../up"], errors.USAGE, "malformed_name"),
        (["push", "first", "--to", "memory:", "--tag", "x", "--no-tag"], errors.USAGE, "invalid_input"),
        (["verify", "first"], errors.USAGE, "invalid_input"),
        (["match", "1", "2"], errors.USAGE, "invalid_input"),
        (["match", "--fingerprint", "sha256:" + "0" * 64], errors.USAGE, "invalid_input"),
        (["match", "1", "--fingerprint", "x"], errors.USAGE, "malformed_digest"),
        (["match", "--text", "a", "--fingerprint", "x"], errors.USAGE, "invalid_input"),
        (["deposit", "--model", "smollm2"], errors.USAGE, "invalid_input"),
        (["deposit", "nowhere.txt", "--model", "smollm2"], errors.USAGE, "invalid_input"),
        (["import", "nowhere"], errors.USAGE, "invalid_input"),
        (["serve", "--port", "99999"], errors.USAGE, "usage"),
        (["serve", "--repo", "http://127.0.0.1:1"], errors.USAGE, "malformed_url"),
        (["show", "unknown"], errors.NOT_FOUND, "tag_not_found"),
        (["rm", "sha256:00000000"], errors.NOT_FOUND, "artifact_not_found"),
        (["tag", "--delete", "unknown"], errors.NOT_FOUND, "tag_not_found"),
        (["ls", "--repo", "http://127.0.0.1:1"], errors.UNAVAILABLE, "unavailable"),
    ],
)
def test_bad_input_is_an_error_with_a_code(
    kvgraft: Kvgraft, first: ArtifactInfo, args: list[str], code: int, error: str
) -> None:
    as_json, as_text = kvgraft(*args, "--json"), kvgraft(*args)
    assert (as_json.code, as_json.error["code"]) == (code, error)
    assert as_text.code == code
    assert as_text.err.startswith("kvgraft: ")
    assert as_text.err.endswith(f" [{error}]\n")
    assert "Traceback" not in as_text.err
    assert kvgraft("ls", "--json").json["items"] == [first.model_dump(mode="json")]


@pytest.mark.parametrize("args", [["ls"], ["show", "x"], ["stats"], ["tag", "--list"], ["reindex"], ["rm", "x"]])
def test_a_mistyped_repository_is_an_error_and_is_not_created(
    kvgraft: Kvgraft, tmp_path: Path, args: list[str]
) -> None:
    result = kvgraft(*args, "--json")
    assert (result.code, result.error["code"]) == (errors.UNAVAILABLE, "not_a_repository")
    assert not (tmp_path / "repo").exists()


def test_a_repository_of_a_newer_format_is_refused(kvgraft: Kvgraft, tmp_path: Path, first: ArtifactInfo) -> None:
    marker = tmp_path / "repo" / "kvgraft.json"
    marker.write_text(marker.read_text().replace('"version":1', '"version":3'))
    result = kvgraft("show", first.id, "--json")
    assert (result.code, result.error["code"]) == (errors.UNAVAILABLE, "newer_format")


@pytest.mark.usefixtures("first")
def test_a_port_in_use_is_an_error(kvgraft: Kvgraft) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = kvgraft("serve", "--port", taken.getsockname()[1], "--json")
    assert (result.code, result.error["code"]) == (errors.UNAVAILABLE, "port_in_use")


@pytest.mark.usefixtures("first")
def test_a_fault_in_kvgraft_is_one_line_and_its_traceback_is_there_on_request(
    kvgraft: Kvgraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("on\npurpose")

    monkeypatch.setattr(browse, "_print_page", fail)
    result = kvgraft("ls")
    assert result.code == errors.INTERNAL
    assert result.err.count("\n") == 1
    monkeypatch.setenv(errors.TRACEBACK_VARIABLE, "1")
    assert "Traceback" in kvgraft("ls").err


def test_an_interrupt_is_quiet(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    os.mkfifo(tokens)
    child = process("match", "--tokens-file", str(tokens), "--fingerprint", "sha256:" + "0" * 64)
    with tokens.open("w"):  # Opens once the command reads.
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (errors.INTERRUPTED, "", "")


@pytest.mark.usefixtures("first")
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "repo_service.cli", "show", "first", "--json", "--repo", url(tmp_path / "repo")]
    with os.fdopen(writing, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (errors.BROKEN_PIPE, "")


# Looking


def test_ls_lists_pages(kvgraft: Kvgraft, first: ArtifactInfo, second: ArtifactInfo) -> None:
    page = kvgraft("ls", "--limit", 1, "--json").json
    assert [item["id"] for item in page["items"]] == [second.id]
    rest = kvgraft("ls", "--limit", 1, "--cursor", page["next_cursor"], "--json").json
    assert rest["items"] == [first.model_dump(mode="json")]
    assert (rest["count"], rest["next_cursor"]) == (2, None)
    result = kvgraft("ls")
    assert f"{output.short(first.id)}  100     10.9 KiB" in result.out
    assert (
        result.err
        == f"2 artifacts, {output.size(page['total_bytes'])}, {output.size(page['unique_bytes'])} of them unique\n"
    )


@pytest.mark.usefixtures("second")
def test_query_has_an_option_for_every_condition(kvgraft: Kvgraft, first: ArtifactInfo) -> None:
    with open_repository(options.expanded(os.environ["KVGRAFT_REPO"])) as repository:
        manifest = repository.manifest(first.id, "default")
        chunk = repository.records(manifest, "default")[6].chunks["full/k"][0]
    conditions: dict[str, list[object]] = {
        "fingerprint_id": ["--fingerprint", first.fingerprint_id],
        "model_id": ["--model-id", first.model_id],
        "min_tokens": ["--min-tokens", 100],
        "max_tokens": ["--max-tokens", 100],
        "covers": ["--covers", "90:100"],
        "block_key": ["--block-key", manifest.blocks[6][0]],
        "chunk": ["--chunk", chunk],
        "token_prefix": ["--token-prefix", ",".join(map(str, range(33)))],
        "tag": ["--tag", "first"],
        "annotations": ["--annotation", f"source=mill{ESCAPE}"],
        "exactness": ["--exactness", "exact"],
        "created_after": ["--created-after", "2020-01-01"],
        "created_before": ["--created-before", "9000-01-01T00:00:00+00:00"],
        "text": ["--text", "tide"],
        "namespace": ["--namespace", "default"],
        "sort": ["--sort", "token_count"],
        "descending": ["--ascending"],
        "limit": ["--limit", 2],
    }
    assert set(conditions) == set(ArtifactQuery.model_fields) - {"cursor"}
    for name, args in conditions.items():
        ids = [item["id"] for item in kvgraft("query", *args, "--json").json["items"]]
        assert first.id in ids, name
        if name in {"min_tokens", "covers", "block_key", "chunk", "token_prefix", "tag", "annotations", "text"}:
            assert ids == [first.id], name
    assert kvgraft("query", *chain(*conditions.values()), "--json").json["count"] == 1
    assert kvgraft("query", "--exactness", "lossy", "--json").json["items"] == []


def test_show_has_the_facts_of_an_artifact(kvgraft: Kvgraft, first: ArtifactInfo) -> None:
    shown = kvgraft("show", first.id[:15], "--fingerprint", "--json").json
    assert shown["artifact"] == first.model_dump(mode="json")
    assert shown["fingerprint"] == fingerprint().sections
    assert [group["name"] for group in shown["layer_groups"]] == ["full", "sliding"]
    assert shown["text"] == "a tide mill"
    assert "fingerprint" not in kvgraft("show", "first", "--json").json
    text = kvgraft("show", "first", "--fingerprint").out
    assert "numerics.isa" in text
    assert "sliding(32)" in text


@pytest.mark.usefixtures("first")
def test_text_from_an_artifact_can_not_drive_the_terminal(kvgraft: Kvgraft) -> None:
    shown = kvgraft("show", "first").out
    assert "\x1b" not in shown
    assert "mill\\x1b[31m" in shown


def test_text_that_the_terminal_has_no_letters_for_is_escaped(tmp_path: Path) -> None:
    info = publish(tmp_path / "repo", *artifact(range(20), annotations={"mill": "grüße"}))
    child = process("show", info.id, "--repo", url(tmp_path / "repo"), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    out, err = child.communicate()
    assert (child.returncode, err) == (0, "")
    assert "gr\\xfc\\xdfe" in out


@pytest.mark.usefixtures("first")
def test_stats_show_divergences(kvgraft: Kvgraft, tmp_path: Path) -> None:
    with pytest.raises(Divergence):
        publish(tmp_path / "repo", *artifact(range(100), seed=1))
    shown = kvgraft("stats", "--divergences", "--json").json
    assert shown["stats"]["divergences"] == 1
    assert [d["chunks"] for d in shown["divergences"]] == [["full/k", "full/v", "sliding/k", "sliding/v"]]
    assert shown["repository"]["format_version"] == 1
    assert "--divergences" in kvgraft("stats").out
    assert shown["divergences"][0]["block_key"] in kvgraft("stats", "--divergences").out


def test_match_needs_a_fingerprint_and_no_model(kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([*range(40), 7, 7, 7]))
    found = kvgraft("match", "--tokens-file", tokens, "--fingerprint", first.fingerprint_id, "--json").json
    assert found == {"match": {"artifact_id": first.id, "blocks": 2, "tokens": 32}, "tokens": 43}
    whole = kvgraft("match", *range(100), "--fingerprint", first.fingerprint_id, "--json").json
    assert whole["match"]["tokens"] == 100
    for ids, made_under in (["5"], first.fingerprint_id), (["0"], "sha256:" + "0" * 64):
        nothing = kvgraft("match", *ids, "--fingerprint", made_under, "--json")
        assert nothing.json == {"match": None, "tokens": 1}
        assert nothing.code == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"1 x", b"[1, 2.0]", b"[true]", b"{}", b"\xff", b"[" * 100_000, b"-3"])
def test_a_file_without_token_ids_is_refused(
    kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "tokens").write_bytes(content)
    result = kvgraft("match", "--tokens-file", tmp_path / "tokens", "--fingerprint", first.fingerprint_id, "--json")
    assert result.code == errors.USAGE
    assert result.error["code"] == ("invalid_input" if content == b"\xff" else "invalid_tokens")


# Changing


def test_tags_are_set_moved_listed_and_deleted(kvgraft: Kvgraft, first: ArtifactInfo, second: ArtifactInfo) -> None:
    assert kvgraft("tag", "first", "latest", "--json").json["artifact_id"] == first.id
    assert kvgraft("tag", second.id, "latest", "--json").json["artifact_id"] == second.id
    listed = kvgraft("tag", "--list", "--json").json["items"]
    assert {tag["name"]: tag["artifact_id"] for tag in listed} == {
        "first": first.id,
        "latest": second.id,
        "second": second.id,
    }
    assert kvgraft("tag", "--delete", "latest", "--json").json == {"namespace": "default", "deleted": "latest"}
    assert kvgraft("tag", "--list").out.count("sha256:") == 2
    assert kvgraft("show", second.id).code == 0


@pytest.mark.usefixtures("second")
def test_rm_deletes_an_artifact_and_its_tags(kvgraft: Kvgraft, first: ArtifactInfo) -> None:
    report = kvgraft("rm", "first", "--json").json
    assert (report["artifact_id"], report["tags"]) == (first.id, ["first"])
    assert report["chunks"] > 0
    assert kvgraft("show", "first").code == errors.NOT_FOUND
    assert kvgraft("verify", "second", "--storage-only").code == 0


@pytest.mark.usefixtures("first")
def test_reindex_rebuilds_a_lost_index(kvgraft: Kvgraft, tmp_path: Path) -> None:
    def listed() -> list[dict[str, Any]]:
        # When an artifact was last used is not in the store.
        return [item | {"last_used_at": None} for item in kvgraft("ls", "--json").json["items"]]

    before = listed()
    for file in (tmp_path / "repo").glob("index.sqlite*"):
        file.unlink()
    report = kvgraft("reindex", "--json")
    assert (report.code, report.json["artifacts"], report.json["tags"]) == (0, 1, 1)
    assert listed() == before
    for file in (tmp_path / "repo").glob("index.sqlite*"):
        file.unlink()
    assert listed() == before, "opening rebuilds it too"


@pytest.mark.usefixtures("first")
def test_reindex_tells_what_it_could_not_read(kvgraft: Kvgraft, tmp_path: Path) -> None:
    entry = next((tmp_path / "repo" / "entries").rglob("*.json"))
    entry.write_bytes(entry.read_bytes()[:-1])
    result = kvgraft("reindex", "--json")
    assert result.code == errors.INEXACT
    assert result.json["artifacts"] == 1, "the index knew it"
    assert result.json["corrupt"] == [str(entry.relative_to(tmp_path / "repo"))]
    for file in (tmp_path / "repo").glob("index.sqlite*"):
        file.unlink()
    result = kvgraft("reindex", "--json")
    assert result.code == errors.INEXACT
    assert result.json["artifacts"] == 0
    assert len(result.json["corrupt"]) == 2  # The entry, and the tag that now points at nothing.


@pytest.mark.usefixtures("first")
def test_verify_of_storage_finds_an_altered_chunk(kvgraft: Kvgraft, tmp_path: Path) -> None:
    whole = kvgraft("verify", "first", "--storage-only", "--json")
    assert (whole.code, whole.json["corrupt"]) == (0, [])
    chunk = next(path for path in (tmp_path / "repo" / "chunks").rglob("*") if path.is_file())
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    altered = kvgraft("verify", "first", "--storage-only", "--json")
    assert altered.code == errors.INEXACT
    assert altered.json["corrupt"] == [f"blake3:{chunk.parent.name}{chunk.name}"]
    assert "lost or altered: blake3:" in kvgraft("verify", "first", "--storage-only").out


def test_export_and_import_give_the_same_artifact(kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path) -> None:
    exported = kvgraft("export", "first", tmp_path / "a.zarr", "--json").json
    assert exported["artifact_id"] == first.id
    there = url(tmp_path / "there")
    imported = kvgraft("import", tmp_path / "a.zarr", "--tag", "again", "--repo", there, "--json").json
    assert (imported["id"], imported["tags"]) == (first.id, ["again"])
    again = kvgraft("export", "first", tmp_path / "a.zarr", "--json")
    assert (again.code, again.error["code"]) == (errors.CONFLICT, "conflict")
    shutil.rmtree(tmp_path / "a.zarr" / "tokens")
    broken = kvgraft("import", tmp_path / "a.zarr", "--repo", there, "--json")
    assert broken.code == errors.INEXACT


# Repositories


def test_the_default_repository_is_in_the_home_directory(
    kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.environ["KVGRAFT_REPO"]
    monkeypatch.delenv("KVGRAFT_REPO")
    assert kvgraft("pull", "first", "--from", here, "--json").json["artifact"]["id"] == first.id
    home = tmp_path / "home" / ".local" / "share" / "kvgraft" / "repository"
    assert home.is_dir()
    assert kvgraft("stats", "--json").json["url"] == url(home)


def test_push_and_pull_carry_the_tag_unless_told_otherwise(
    kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path
) -> None:
    there = url(tmp_path / "there")
    for args, tags in (
        (["first", "--no-tag"], []),
        ([first.id], []),
        (["first", "--tag", "other"], ["other"]),
        (["first"], ["first", "other"]),
    ):
        report = kvgraft("push", *args, "--to", there, "--to-namespace", "team", "--json").json
        assert report["artifact"]["tags"] == tags
        assert report["artifact"]["namespace"] == "team"
    back = kvgraft("pull", "other", "--from", there, "--from-namespace", "team", "--json").json
    assert (back["artifact"]["id"], back["bytes_sent"]) == (first.id, 0)


def test_serve_announces_its_address_and_ends_on_a_signal(
    kvgraft: Kvgraft, first: ArtifactInfo, tmp_path: Path
) -> None:
    child = process("serve", "--repo", url(tmp_path / "repo"), "--port", "0", "--json")
    try:
        assert child.stdout is not None
        served = json.loads(child.stdout.readline())
        assert served["repository"] == url(tmp_path / "repo")
        assert kvgraft("ls", "--repo", served["url"], "--json").json["items"] == [first.model_dump(mode="json")]
        pushed = kvgraft("push", "first", "--to", served["url"], "--to-namespace", "team", "--json").json
        assert pushed["bytes_sent"] == pushed["bytes_total"]
    finally:
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "")
    # Lines of the log, and those of the audit log.
    acts = [line for line in err.splitlines() if " INFO kvgraft.access " not in line]
    assert [json.loads(line)["did"] for line in acts] == ["push", "tag"]


def test_a_command_that_another_process_started_ends_when_that_is_killed(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys, time\nfrom repo_service.cli.children import Children\n"
        "with Children() as children:\n"
        "    print(children.begin('serve', '--repo', 'memory:', '--port', '0', log=pathlib.Path(sys.argv[1]))['url'], flush=True)\n"
        "    time.sleep(600)"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        parent.kill()
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)
    pytest.fail("the service outlived the process that started it")
