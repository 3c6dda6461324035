"""Needles in contexts of 1 to 128 windows, by each way past the window: what is read, and what it takes on the device.

Long: every answer is a line of ``results/ladder.jsonl``, and what has a line is not asked again. So a run that ends is
gone on with, on whichever machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.haystack import Haystack, Hidden, haystack, spread
from benchmarks.ladder_plot import draw
from benchmarks.ladder_ways import Joint, Library, Plain, Text, Truncated, Way
from benchmarks.lines import Lines
from benchmarks.needles import TASKS, passkey
from benchmarks.record import machine
from engine_adapter import GraftSession, open_repository
from engine_adapter.demo_models import resolve
from engine_adapter.joint import JointSession
from engine_adapter.joint_settings import JointSettings

RESULTS = Path(__file__).parent / "results" / "ladder.jsonl"
MULTIPLES = [1, 2, 4, 8, 16, 32, 64, 88, 128]
WAYS = ("truncated", "plain", "library", "text", "joint")

_KEY = ("model", "window", "way", "task", "multiple", "trial")
# Dense attention over more takes hours, and is worth nothing by then.
_PLAIN_TOKENS = 32_768
_CHECKED_MULTIPLE = 8
_SEEDS = 2
_NEEDLES = 3
_STRAW_SEED = 1


@dataclass(frozen=True)
class Ladder:
    """A model in a window, and how far it is taken."""

    model: str
    window: int
    dtype: str = "bfloat16"
    representatives: int = 16
    multiples: tuple[int, ...] = tuple(MULTIPLES)


LADDERS = [
    Ladder("smollm2", 2048),
    Ladder("gemma3", 2048, representatives=64),
    Ladder("smollm2", 8192),
]


@dataclass(frozen=True)
class Context:
    """A haystack that is asked about once or more.

    Attributes
    ----------
    trials
        Needles by their numbers in the haystack, and the trial that each is.
    """

    task: str
    multiple: int
    hidden: list[Hidden]
    seed: int
    trials: dict[int, int]

    @property
    def first_place(self) -> int:
        return min(place for one in self.hidden for place in one.places)


def run(
    ladders: Sequence[Ladder], ways: Sequence[str], tasks: Sequence[str], results: Path = RESULTS
) -> dict[str, Any]:
    """Ask what has no line in ``results`` yet, and say what all lines come to."""
    lines = Lines(results, _KEY)
    for ladder in ladders:
        with _Bench(ladder) as bench:
            for name in ways:
                _climb(bench, name, tasks, lines)
    return summary(lines)


def _climb(bench: _Bench, name: str, tasks: Sequence[str], lines: Lines) -> None:
    ladder, way = bench.ladder, None
    with ExitStack() as stack:
        for context in (context for task in tasks for context in _contexts(ladder, name, task)):
            about: dict[str, Any] = {
                "model": ladder.model,
                "window": ladder.window,
                "way": name,
                "task": context.task,
                "multiple": context.multiple,
            }
            due = {n: trial for n, trial in context.trials.items() if about | {"trial": trial} not in lines}
            if not due:
                continue
            if way is None:
                way = bench.way(name)
                stack.callback(way.close)
            length = context.multiple * ladder.window
            hay = bench.haystack(context).upto(length)
            readings = way.ask(hay, {number: context.hidden[number].needle for number in due})
            for (number, trial), reading in zip(due.items(), readings, strict=True):
                depth = [round(place / length, 3) for place in context.hidden[number].places]
                made_with = {"dtype": ladder.dtype, "cpu": bench.cpu}
                lines.append(
                    about | {"trial": trial, "depth": depth, "tokens": len(hay.tokens)} | asdict(reading) | made_with
                )
                print(*about.values(), f"trial {trial}: {reading}", file=sys.stderr, flush=True)


def _contexts(ladder: Ladder, way: str, task: str) -> Iterator[Context]:
    """In an order in which each shares as much of its beginning as possible with the one before it."""
    multiples = [
        multiple for multiple in ladder.multiples if way != "plain" or multiple * ladder.window <= _PLAIN_TOKENS
    ]
    if task == "passkey":
        contexts = []
        for multiple in multiples:
            count = _passkeys(way, multiple)
            for trial, needle in enumerate(passkey(count, multiple)):
                place = int((trial + 0.5) / count * 0.97 * multiple * ladder.window)
                contexts.append(Context(task, multiple, [Hidden(needle, (place,))], _STRAW_SEED, {0: trial}))
        yield from sorted(contexts, key=lambda context: (-context.first_place, context.multiple))
        return
    for seed in range(_SEEDS):
        hidden: list[Hidden] = []
        needles = TASKS[task](_NEEDLES * len(MULTIPLES), seed)
        for rung, multiple in enumerate(MULTIPLES):
            own = needles[rung * _NEEDLES : (rung + 1) * _NEEDLES]
            hidden += spread(own, multiple * ladder.window, seed * 1000 + multiple)
        for rung, multiple in enumerate(MULTIPLES):
            if multiple in multiples:
                numbers = range(rung * _NEEDLES, (rung + 1) * _NEEDLES)
                yield Context(task, multiple, hidden, seed, {n: seed * _NEEDLES + n % _NEEDLES for n in numbers})


def _passkeys(way: str, multiple: int) -> int:
    """How many passkeys: enough for what is claimed, where that is, and few where a context takes long."""
    if multiple < 88:
        return 5
    if way == "library":
        return 50
    return {88: 20, 128: 10}[multiple] if way == "joint" else 10


class _Bench(ExitStack):
    """A loaded model, and the sessions that ways have of it."""

    def __init__(self, ladder: Ladder) -> None:
        super().__init__()
        self.ladder = ladder
        self.cpu: str = machine()["cpu"]
        self._haystack: tuple[Any, Haystack] | None = None

    @cached_property
    def _path(self) -> str:
        return resolve(self.ladder.model)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._path)

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._path, dtype=getattr(torch, self.ladder.dtype)).eval()

    @cached_property
    def session(self) -> GraftSession:
        directory = self.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-bench-"))
        repository = self.enter_context(open_repository(f"file://{directory}/repository"))
        return self.enter_context(GraftSession(self.model, self.tokenizer, repository))

    def way(self, name: str) -> Way:
        window = self.ladder.window
        match name:
            case "truncated":
                return Truncated(self.session, window)
            case "plain":
                return Plain(self.session)
            case "library":
                return Library(self.session, window, checked_tokens=_CHECKED_MULTIPLE * window)
            case "text":
                return Text(self.session, window)
        settings = JointSettings(window=window, representatives=self.ladder.representatives)
        return Joint(JointSession(self.model, self.tokenizer, settings))

    def haystack(self, context: Context) -> Haystack:
        """As long as any rung of it needs; the same for those of one growing haystack."""
        longest = context.multiple if context.task == "passkey" else max(self.ladder.multiples)
        key = (context.task, context.seed, longest, context.first_place)
        if self._haystack is None or self._haystack[0] != key:
            self._haystack = key, haystack(self.tokenizer, longest * self.ladder.window, context.hidden, context.seed)
        return self._haystack[1]


def summary(lines: Lines) -> dict[str, Any]:
    """What all lines come to, by model and window, way, task and multiple."""
    found: dict[str, Any] = {}
    for line in lines:
        ladder = found.setdefault(f"{line['model']}, window {line['window']}, {line['dtype']}", {})
        rungs = ladder.setdefault(line["way"], {}).setdefault(line["task"], {})
        rung = rungs.setdefault(f"{line['multiple']}x", {"asked": 0, "share": 0.0, "device_bytes": 0})
        rung["asked"] += 1
        rung["share"] += line["share"]
        rung["device_bytes"] = max(rung["device_bytes"], line["device_bytes"])
        for name in ("found", "same_bits"):
            if line[name] is not None:
                rung[name] = rung.get(name, 0) + line[name]
        rung.setdefault("checked", 0)
        rung["checked"] += line["same_bits"] is not None
    for rung in (
        rung
        for ways in found.values()
        for tasks in ways.values()
        for rungs in tasks.values()
        for rung in rungs.values()
    ):
        rung["share"] = round(rung["share"] / rung["asked"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder",
        description=f"{__doc__}\n\nA part of what `python -m benchmarks ladder` runs.",
        epilog="example: python -m benchmarks.ladder --model smollm2 --window 2048 --way joint --task passkey",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted({ladder.model for ladder in LADDERS}), help="all by default")
    parser.add_argument(
        "--window", type=int, choices=sorted({ladder.window for ladder in LADDERS}), help="all by default"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="may be repeated; all by default")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="may be repeated; all by default")
    parser.add_argument("--up-to", type=int, default=max(MULTIPLES), help="the largest multiple of the window")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are read and written")
    arguments = parser.parse_args()
    ladders = [
        replace(ladder, multiples=tuple(m for m in ladder.multiples if m <= arguments.up_to))
        for ladder in LADDERS
        if arguments.model in (None, ladder.model) and arguments.window in (None, ladder.window)
    ]
    found = run(ladders, arguments.way or WAYS, arguments.task or list(TASKS), arguments.results)
    draw(found, arguments.results.parent)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
