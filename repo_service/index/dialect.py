"""The SQL that differs between SQLite and PostgreSQL, in one place.

Engines, locks and pragmas are in `engine`; the full-text table itself is made by the migrations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    bindparam,
    column,
    func,
    literal_column,
    select,
    table,
)
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute

DIGEST_BYTES = 32

# SQLite generates keys only for a column whose type is exactly INTEGER.
BigKey = BigInteger().with_variant(Integer, "sqlite")

_SEARCH = table("artifact_search", column("rowid"), column("artifact_search"))


def insert_new(model: type[DeclarativeBase]) -> Insert:
    """An insert that leaves rows which exist as they are."""
    return insert(table_of(model)).on_conflict_do_nothing()


def insert_many(
    connection: Connection,
    columns: Sequence[InstrumentedAttribute[Any]],
    rows: Iterable[Sequence[Any]],
    *,
    overwrite: bool = False,
) -> None:
    """Insert rows of plain values, leaving those that exist as they are or overwriting them.

    An artifact may have a hundred thousand rows, for which the driver alone is three times as fast
    as SQLAlchemy's handling of each row's parameters.
    """
    parameters = [tuple(row) for row in rows]
    if not parameters:
        return
    target: Table = columns[0].class_.__table__
    names = ", ".join(f'"{column.key}"' for column in columns)
    marks = ", ".join("?" * len(columns))
    action = "DO NOTHING"
    if overwrite:
        primary = {column.key for column in target.primary_key.columns}
        updates = ", ".join(f"{c.key} = excluded.{c.key}" for c in columns if c.key not in primary)
        action = f"({', '.join(sorted(primary))}) DO UPDATE SET {updates}"
    connection.exec_driver_sql(f"INSERT INTO {target.name} ({names}) VALUES ({marks}) ON CONFLICT {action}", parameters)


def table_of(model: type[DeclarativeBase]) -> Table:
    result = model.__table__
    assert isinstance(result, Table)
    return result


def text_matches(words: Sequence[str]) -> Any:
    """Ids of the artifacts whose text holds every word, as a subquery.

    Each word is quoted, so that nothing in it is read as query syntax; FTS5 stops at a NUL.
    """
    query = " ".join('"{}"'.format(word.replace('"', '""')) for word in words)
    return select(_SEARCH.c.rowid).where(_SEARCH.c.artifact_search.op("MATCH")(query))


def id_list(name: str = "ids") -> Select[int]:
    """Row numbers bound to a statement by `bound_ids`, as a subquery, whatever their number."""
    return select(func.json_each(bindparam(name, type_=Text)).table_valued(column("value", Integer)).c.value)


def bound_ids(ids: Iterable[int], name: str = "ids") -> dict[str, Any]:
    return {name: json.dumps(list(ids))}


def digest_list(name: str = "digests") -> CTE:
    """Digests bound to a statement, as rows ``(position, digest)``, whatever their number.

    Bind them with `bound`. One packed parameter takes the place of one variable for each,
    of which SQLite allows 32,766.
    """
    count = bindparam(f"{name}_count", type_=Integer)
    packed = bindparam(name, type_=LargeBinary)
    numbers = select(literal_column("0").label("position")).where(count > 0).cte(f"{name}_numbers", recursive=True)
    following = numbers.c.position + 1
    numbers = numbers.union_all(select(following).where(following < count))
    return select(numbers.c.position, digest_at(packed, numbers.c.position).label("digest")).cte(name)


def bound(digests: Sequence[bytes], name: str = "digests") -> dict[str, Any]:
    """Parameters for `digest_list`."""
    return {name: b"".join(digests), f"{name}_count": len(digests)}


def digest_at(packed: ColumnElement[bytes], position: ColumnElement[int]) -> ColumnElement[bytes]:
    """The digest at a position, counted from 0, of a packed parameter."""
    return func.substr(packed, position * DIGEST_BYTES + 1, DIGEST_BYTES, type_=LargeBinary)
