"""Timing in turn, medians, and the dated file a result goes to."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("kvgraft", "torch", "transformers", "zarr", "blake3", "sqlalchemy", "fastapi", "uvicorn", "urllib3")


def timed_in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, run one after another in every round, after one round that does not count.

    Rounds interleave the ways, so that a change of the machine's speed meets all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def rates(seconds: Mapping[str, list[float]], size: int) -> dict[str, float]:
    """Median GB/s of each way over ``size`` bytes."""
    return {name: round(size / statistics.median(values) / 1e9, 3) for name, values in seconds.items()}


def ratios(seconds: Mapping[str, list[float]], floor: str) -> dict[str, float]:
    """Median over rounds of each way's speed relative to ``floor`` in the same round (1 is equal, more is faster)."""
    return {
        name: round(statistics.median(f / s for f, s in zip(seconds[floor], values, strict=True)), 3)
        for name, values in seconds.items()
    }


def machine() -> dict[str, Any]:
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def record(name: str, result: Mapping[str, Any], started: dict[str, Any]) -> Path:
    """Write a result beside the earlier ones and print it."""
    now = datetime.now(UTC)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    document = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "machine": started,
        "result": result,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}-{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    json.dump(document["result"], sys.stdout, indent=2)
    print(f"\nwritten to {path}", file=sys.stderr)
    return path


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
