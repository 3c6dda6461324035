"""Results line by line, for what takes hours: a run that ends is gone on with, on whichever machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Lines:
    """A file of one JSON object a line.

    Parameters
    ----------
    path
        Made with the first line.
    key
        The names whose values tell lines apart.
    """

    def __init__(self, path: Path, key: tuple[str, ...]) -> None:
        self.path = path
        self._key = key
        self._held = {self._of(line) for line in self}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            yield from map(json.loads, self.path.read_text().splitlines())

    def __contains__(self, about: Mapping[str, Any]) -> bool:
        return self._of(about) in self._held

    def append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._held.add(self._of(line))

    def _of(self, line: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(line[name] for name in self._key)
