"""One process of the cross-process tests: load a model, deposit or graft, print what came out as JSON.

Usage: ``python graft_process.py URL MODEL DTYPE ATTENTION THREADS deposit|prefill|graft TOKENS_JSON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_process(
    url: str,
    model: str,
    action: str,
    tokens: list[int],
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    threads: int = 1,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run this file in a process of its own, with ``env`` added to the environment."""
    command = command_of(url, model, action, tokens, dtype=dtype, attention=attention, threads=threads)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def command_of(
    url: str,
    model: str,
    action: str,
    tokens: list[int],
    *,
    dtype: str = "float32",
    attention: str = "sdpa",
    threads: int = 1,
) -> list[str]:
    """What runs this file."""
    return [sys.executable, __file__, url, model, dtype, attention, str(threads), action, json.dumps(tokens)]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(Path(__file__).parent))
    from engine_adapter import GraftSession, open_repository
    from engine_adapter.run import logits_sha256
    from repo_service.domain.errors import KvgraftError

    url, path, dtype, attention, threads, action, tokens_json = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokens = json.loads(tokens_json)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    with open_repository(url) as repository, GraftSession(model, None, repository) as session:
        answer: dict[str, Any] = {"fingerprint": session.fingerprint.id}
        try:
            if action == "deposit":
                answer["artifact"] = session.deposit(tokens, tag="stored").id
                run = session.prefill(tokens, graft=False)
            elif action == "graft":
                run = session.graft("stored")
            else:
                run = session.prefill(tokens)
            answer |= {"sha256": logits_sha256(run.logits), "grafted": run.grafted_tokens}
        except KvgraftError as error:
            answer["error"] = error.to_json()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
