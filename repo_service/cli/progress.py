"""Progress on standard error, where that is a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from repo_service.cli import output

Report = Callable[[str, int, int], None]
"""Called with what is counted ("bytes", "tokens"), how many are done, and how many there are."""


def say(line: str) -> None:
    """Tell whoever watches what happens now."""
    if sys.stderr.isatty():
        output.note(line)


@contextmanager
def shown(task: str) -> Iterator[Report]:
    """Show that ``task`` runs, and how far it is once the report is called: a bar for each thing counted."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # A step of a model may take many seconds, so the rate is that of the last ten minutes.
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=600) as bars:
        first = bars.add_task(task, total=None, amount="")
        rows: dict[str, TaskID] = {}

        def report(kind: str, done: int, total: int) -> None:
            if kind not in rows:
                rows[kind] = bars.add_task("", total=None, amount="") if rows else first
            amounts = [output.size(n) if kind == "bytes" else f"{n:,} {kind}" for n in (done, total)]
            bars.update(rows[kind], completed=done, total=total, amount=" of ".join(amounts))

        yield report
