"""``kvgraft demo``: the main job on a real model, from one process through a service to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.demo import QUESTION, TEXT
from repo_service.cli import errors
from repo_service.client import open_repository

PROMISED = (
    "logits_sha256_fresh logits_sha256_grafted exact kl_max argmax_agree samples ttft_fresh_s ttft_grafted_s speedup "
    "tokens bytes_pushed bytes_pulled"
)
DIRECTORIES = "kvgraft-demo-*"
TOKENS = 600
SAMPLES = 12


def demo(temp: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, with what it leaves behind in ``temp``."""
    command = [sys.executable, "-m", "repo_service.cli", "demo", "--json", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(temp), "KVGRAFT_REPO": "x"},
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run's result, and the directory it kept."""
    temp = tmp_path_factory.mktemp("temp")
    kept = tmp_path_factory.mktemp("kept") / "demo"
    done = demo(temp, "--tokens", str(TOKENS), "--samples", str(SAMPLES), "--keep", str(kept))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(temp.glob(DIRECTORIES)) == []
    return json.loads(done.stdout), kept


def test_the_demo_is_exact_and_says_so_with_the_promised_keys(shown: tuple[dict[str, Any], Path]) -> None:
    result, _ = shown
    assert set(PROMISED.split()) <= set(result)
    assert result["exact"] is True
    assert result["logits_sha256_fresh"] == result["logits_sha256_grafted"]
    assert result["logits_sha256_fresh"].startswith("sha256:")
    assert (result["kl_max"], result["argmax_agree"], result["samples"]) == (0.0, SAMPLES, SAMPLES)
    assert result["tokens"] == TOKENS


def test_llama_cpp_26676_the_demo_counts_what_was_grafted_and_what_was_computed(
    shown: tuple[dict[str, Any], Path],
) -> None:
    result, _ = shown
    assert result["grafted_tokens"] == TOKENS // 256 * 256
    assert result["grafted_tokens"] + result["computed_tokens"] == result["prompt_tokens"]


def test_the_demo_moves_every_byte_twice_and_both_repositories_are_whole(shown: tuple[dict[str, Any], Path]) -> None:
    result, kept = shown
    assert result["bytes_pushed"] == result["bytes_pulled"]
    for name in "service", "reader":
        with open_repository((kept / name).as_uri()) as repository:
            report = repository.check("demo", "default")
            assert (report.artifact_id, report.corrupt) == (result["artifact_id"], [])
            assert report.bytes == result["bytes_pulled"]


def test_the_times_of_the_demo_fit_together(shown: tuple[dict[str, Any], Path]) -> None:
    result, _ = shown
    assert result["speedup"] == pytest.approx(result["ttft_fresh_s"] / result["ttft_grafted_s"])
    assert result["ttft_grafted_with_pull_s"] == pytest.approx(result["ttft_grafted_s"] + result["pull_s"])
    assert 0 < result["ttft_fresh_s"] + result["ttft_grafted_with_pull_s"] < result["total_s"]


def test_the_answer_is_in_the_text(shown: tuple[dict[str, Any], Path]) -> None:
    result, _ = shown
    text = (Path(sys.modules["engine_adapter"].__path__[0]) / TEXT).read_text()
    assert "The combination of the sluice house lock is 58214." in text
    assert result["question"] == QUESTION
    assert result["answer"]


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["--tokens", "256"], errors.USAGE, "usage"),
        (["--model", "nowhere/at-all", "--tokens", "300"], errors.MISSING, "model_unavailable"),
        (["--keep", "."], errors.CONFLICT, "conflict"),
    ],
)
def test_a_demo_that_can_not_run_says_why_and_leaves_nothing(
    tmp_path: Path, args: list[str], code: int, error: str
) -> None:
    done = demo(tmp_path, *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert json.loads(done.stderr)["error"]["code"] == error
    assert list(tmp_path.glob(DIRECTORIES)) == []
