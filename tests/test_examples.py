"""The examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import families
import torch
from pushing import push
from synthetic import artifact, fingerprint

from repo_service.client import open_repository
from repo_service.services.export import export_artifact

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    assert all(path.name in here for path in EXAMPLES.glob("*.py"))


def test_deposit_and_graft(tmp_path: Path) -> None:
    families.build("llama", torch.bfloat16, "sdpa").save_pretrained(tmp_path / "model")
    families.tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("A valve must be opened before the pump starts. " * 20)
    out = run(
        "deposit_and_graft.py",
        *("--model", str(tmp_path / "model"), "--repo", f"file://{tmp_path}/repository"),
        *(str(tmp_path / "notes.txt"), "What comes first?"),
    )
    assert "grafted 512 tokens" in out
    assert "logits equal, bit for bit: True" in out


def test_copy_between_repositories(tmp_path: Path) -> None:
    one, two = f"file://{tmp_path}/one", f"file://{tmp_path}/two"
    made = artifact(list(range(40)), fingerprint())
    with open_repository(one) as repository:
        info, _ = push(repository, made)
    assert f"{info.id}: sent {info.total_bytes} of {info.total_bytes}" in run(
        "copy_between_repositories.py", one, two, info.id
    )
    assert f"sent 0 of {info.total_bytes}" in run("copy_between_repositories.py", one, two, info.id)


def test_read_with_zarr(tmp_path: Path) -> None:
    with open_repository(f"file://{tmp_path}/repository") as repository:
        info, _ = push(repository, artifact(list(range(40)), fingerprint()))
        export_artifact(repository, info.id, "default", tmp_path / "export")
    out = run("read_with_zarr.py", str(tmp_path / "export"))
    assert f"{info.id} 40 tokens" in out
    assert "full/k" in out
