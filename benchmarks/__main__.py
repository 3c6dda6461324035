"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import machine, record


def _restore(small: bool) -> Mapping[str, Any]:
    from benchmarks import restore

    return restore.run(blocks=16 if small else 96, rounds=3 if small else 9)


def _push(small: bool) -> Mapping[str, Any]:
    from benchmarks import push

    return push.run(blocks=8 if small else 48, rounds=3 if small else 7)


def _match(small: bool) -> Mapping[str, Any]:
    from benchmarks import match

    return match.run(blocks=20_000 if small else 1_000_000, lookups=2_000)


def _s3_pull(small: bool) -> Mapping[str, Any]:
    from benchmarks import s3_pull

    return s3_pull.run(blocks=8 if small else 48, rounds=3 if small else 7)


def _fleet(small: bool) -> Mapping[str, Any]:
    from benchmarks import fleet

    return fleet.run([1, 2] if small else [1, 2, 4], [1, 2], blocks=4 if small else 16, rounds=2 if small else 6)


def _scale(small: bool) -> Mapping[str, Any]:
    from benchmarks import scale

    sizes = [20_000, 40_000] if small else [1_000_000, 10_000_000, 100_000_000]
    return scale.run(sizes, ["sqlite", "postgres"], 500 if small else 2_000)


def _far_past(small: bool) -> Mapping[str, Any]:
    from benchmarks import far_past

    if small:
        return far_past.run([2_000_000], lookups=200, facts=15, vectors=[20_000])
    return far_past.run([5_000_000, 50_000_000], lookups=2_000, facts=75, vectors=[200_000])


def _far_past_billion(small: bool) -> Mapping[str, Any]:
    from benchmarks import far_past

    if small:
        return _far_past(small)
    return far_past.run([1_000_000_000], lookups=2_000, facts=200, vectors=[4_000_000])


def _upkeep(small: bool) -> Mapping[str, Any]:
    from benchmarks import upkeep

    return upkeep.run(100 if small else 1_000, rounds=1 if small else 3)


def _ttft(small: bool) -> Mapping[str, Any]:
    from benchmarks import ttft

    lengths = [600] if small else [2048, 4096, 8192]
    return {
        f"{dtype}, grouped attention" if grouped else dtype: ttft.run(lengths, 9, "smollm2", dtype, grouped=grouped)
        for dtype in ("float32", "bfloat16")
        for grouped in (False, True)
    }


def _memory(small: bool) -> Mapping[str, Any]:
    from benchmarks import memory

    return memory.run(0.25 if small else 4.0)


def _node_cache(small: bool) -> Mapping[str, Any]:
    from benchmarks import node_cache

    return node_cache.run(blocks=16 if small else 96, rounds=3 if small else 9)


def _paged(small: bool) -> Mapping[str, Any]:
    from benchmarks import paged

    lengths = [600] if small else [1024, 2048, 4096, 7680]
    dtypes = ["float32"] if small else ["float32", "bfloat16"]
    return {dtype: paged.run(lengths, 2 if small else 16, "smollm2", dtype) for dtype in dtypes}


def _joint(small: bool) -> Mapping[str, Any]:
    from benchmarks import joint

    multiples, needles = ([2], 3) if small else ([1, 4, 8, 16], 16)
    return {
        f"{model}, {dtype}": joint.run(model, dtype, 2048, multiples, needles)
        for model, dtype in (("smollm2", "float32"), ("smollm2", "bfloat16"), ("gemma3", "bfloat16"))
    }


def _route(small: bool) -> Mapping[str, Any]:
    from benchmarks import route

    return route.run([1536], 60) if small else route.run([1536, 7680, 32512])


def _near_miss(small: bool) -> Mapping[str, Any]:
    from benchmarks import near_miss

    return {model: near_miss.run(model, 2 if small else 20) for model in ("smollm2", "gemma3")[: 1 if small else 2]}


def _headline(small: bool) -> Mapping[str, Any]:
    from benchmarks import headline

    if small:
        with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory:
            return headline.run(Path(directory), 2, 2048, Path(directory, "headline.jsonl"))
    return headline.run(headline.usual_directory())


def _ladder(small: bool) -> Mapping[str, Any]:
    from benchmarks import ladder, ladder_plot
    from benchmarks.needles import TASKS

    if small:
        with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory:
            steps = [ladder.Ladder("smollm2", 2048, multiples=(1,))]
            return ladder.run(steps, ladder.WAYS, ["multi-key"], Path(directory, "ladder.jsonl"))
    found = ladder.run(ladder.LADDERS, ladder.WAYS, list(TASKS))
    ladder_plot.draw(found, ladder.RESULTS.parent)
    return found


BENCHMARKS: dict[str, tuple[str, Callable[[bool], Mapping[str, Any]]]] = {
    "restore": ("verified restore against a raw read and a sendfile server; safetensors, torch, zarr", _restore),
    "push": ("push against raw write and fsync; safetensors, torch, zarr", _push),
    "match": ("longest-prefix match among 1,000,000 indexed blocks", _match),
    "s3-pull": ("a verified pull out of S3 against plain s3fs and obstore", _s3_pull),
    "fleet": ("1, 2 and 4 clients on 1 and 2 replicas over PostgreSQL and S3", _fleet),
    "scale": ("the same among 1, 10 and 100 million blocks, on SQLite and PostgreSQL", _scale),
    "far-past": ("a library of 5 and 50 million tokens without a model: match, route, recall, memory", _far_past),
    "far-past-billion": ("the same at 1 billion", _far_past_billion),
    "upkeep": ("garbage collection and reindex for each object, on a disk and on S3", _upkeep),
    "ttft": ("time to first token, grafted against fresh, at 2k, 4k and 8k tokens (SmolLM2-135M)", _ttft),
    "memory": ("memory of server and client while a 4 GiB artifact is pulled and grafted", _memory),
    "paged": ("time per token, stalls and device memory, paged against resident, by length (SmolLM2-135M)", _paged),
    "joint": ("needles found, time per token and device memory of joint attention, by length", _joint),
    "ladder": ("needles at 1 to 128 windows by each way past the window; hours, and can be gone on with", _ladder),
    "route": ("the right document among real ones, and what the confidence tells, without a model", _route),
    "near-miss": ("answers from the wrong artifact, with and without the confidence gate", _near_miss),
    "headline": ("2,854,766 tokens in 88 artifacts of Gemma 3 270M; hours, and can be gone on with", _headline),
    "node-cache": ("pull through the service, cold and warm cache of the node, against a raw read", _node_cache),
}


def main() -> None:
    listed = "\n".join(f"  {name:18}{what}" for name, (what, _) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Ratios within one run; results go to benchmarks/results/<date>-<name>.json.",
        epilog=f"benchmarks:\n{listed}\n\nexample: python -m benchmarks restore push",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=[*BENCHMARKS, "all"], metavar="NAME", help="which to run, or all")
    parser.add_argument("--small", action="store_true", help="a quick try on small sizes; nothing is recorded")
    arguments = parser.parse_args()
    names = list(BENCHMARKS) if "all" in arguments.names else arguments.names
    if len(names) > 1:
        # Each in a process of its own, so that none meets another's memory.
        small = ["--small"] if arguments.small else []
        for name in names:
            subprocess.run([sys.executable, "-m", "benchmarks", name, *small], check=True)
        return
    for name in names:
        started = machine()
        result = BENCHMARKS[name][1](arguments.small)
        if arguments.small:
            print(name, result)
        else:
            record(name, result, started)


if __name__ == "__main__":
    main()
