"""What a fault is, and the list of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tests.fault


@dataclass(frozen=True)
class Fault:
    """One fault, tried many times.

    Parameters
    ----------
    name
        As on the command line.
    target
        What must hold, in words.
    run
        Called with an empty directory, a seed and the sizes; returns figures, and raises
        `AssertionError` where the target is missed.
    short, full
        Sizes for CI and for the bar, as keyword arguments of ``run``.
    """

    name: str
    target: str
    run: Callable[..., dict[str, Any]]
    short: Mapping[str, float] = field(default_factory=dict)
    full: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, directory: Path, seed: int, *, full: bool) -> dict[str, Any]:
        return self.run(directory, seed, **(self.full if full else self.short))


def faults() -> Iterator[Fault]:
    """Every fault of every module here, in the order of modules and then of their ``FAULTS``."""
    for module in sorted(m.name for m in pkgutil.iter_modules(tests.fault.__path__)):
        if not module.startswith("_"):
            yield from getattr(importlib.import_module(f"tests.fault.{module}"), "FAULTS", ())
