"""What a database's plan of a statement says about how much it reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Not tables: lists bound to the statement, a match's own rows, and the full-text index.
_BOUND = re.compile(
    r"SCAN (CONSTANT ROW|\w+_numbers|search|found|anon_1 VIRTUAL TABLE|artifact_search VIRTUAL TABLE)\b"
)

_PASSING = ("Append", "Incremental Sort", "LockRows", "Merge Append", "Result", "Subquery Scan", "Unique")
"""Steps that take no more from what is below them than is asked of them."""

_LOOKUPS_COST = 300
"""Of as many lookups as a page has rows, whatever the table."""


def sqlite_scans(steps: Sequence[str]) -> list[str]:
    """Those of the steps of plans in SQLite that read a table as a whole."""
    return [step for step in steps if step.startswith("SCAN") and not _BOUND.match(step)]


def postgres_scans(plan: dict[str, Any], whole: Mapping[str, float]) -> list[str]:
    """Those of the steps of a plan in PostgreSQL that read a table that grows as a whole, or much of it.

    A step that has a condition for its index is held to its cost: the condition may leave nearly every row, as that
    on a namespace does, and where a filter is left over, a page's first rows may be the table's last.

    Parameters
    ----------
    plan
        The plan's first step, in JSON.
    whole
        The tables that grow, and what it costs to read all of each.
    """
    return [_shown(step) for step, paged in _steps(plan, paged=False) if _is_scan(step, paged, whole)]


def _steps(step: dict[str, Any], *, paged: bool) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each step, and whether a limit takes only the first rows it comes upon, and takes all of those."""
    yield step, paged
    kind = step["Node Type"]
    joins_all = kind == "Nested Loop" and step["Join Type"] in ("Inner", "Left") and "Join Filter" not in step
    passes = kind == "Limit" or (paged and (kind in _PASSING or joins_all) and "Filter" not in step)
    for below in step.get("Plans", ()):
        yield from _steps(below, paged=passes and below["Parent Relationship"] in ("Outer", "Member", "Subquery"))


def _is_scan(step: dict[str, Any], paged: bool, whole: Mapping[str, float]) -> bool:
    kind = step["Node Type"]
    if kind == "Bitmap Index Scan":
        return "Index Cond" not in step
    table = str(step.get("Relation Name"))
    if table not in whole or kind == "ModifyTable":
        return False
    dear = float(step["Total Cost"]) > max(_LOOKUPS_COST, whole[table] / 4)
    if kind == "Bitmap Heap Scan":
        return dear
    if kind not in ("Index Scan", "Index Only Scan"):
        return True
    in_order = paged and "Filter" not in step
    return not in_order and ("Index Cond" not in step or dear)


def _shown(step: dict[str, Any]) -> str:
    shown = ("Node Type", "Relation Name", "Index Name", "Index Cond", "Recheck Cond", "Filter", "Total Cost")
    return ", ".join(str(step[name]) for name in shown if name in step)
