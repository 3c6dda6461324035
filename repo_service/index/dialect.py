"""The SQL that differs between SQLite and PostgreSQL, in one place.

Connections, transactions and locks are in `sqlite` and `postgres`; the full-text table itself is made by the migrations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Insert,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    TypeDecorator,
    bindparam,
    cast,
    column,
    false,
    func,
    insert,
    literal,
    literal_column,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

SQLITE = "sqlite"
POSTGRES = "postgresql"
DIGEST_BYTES = 32

# SQLite generates keys only for a column whose type is exactly INTEGER.
BigKey = BigInteger().with_variant(Integer, SQLITE)

# Compared and sorted by bytes, as SQLite does, whatever the database's locale.
PlainText = Text().with_variant(Text(collation="C"), POSTGRES)

_SEARCH = table("artifact_search", column("rowid"), column("artifact_search"))
_WORDS = table("artifact_words", column("artifact_id", BigInteger), column("words", ARRAY(Text)))
_WORD = re.compile(r"[^\W_]+")


class AnyText(TypeDecorator[str]):
    """Text of people, which may hold a NUL; PostgreSQL takes none, so there it is written with an escape."""

    impl = PlainText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None or dialect.name != POSTGRES else to_stored(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None or dialect.name != POSTGRES else _from_stored(value)


def to_stored(text: str) -> str:
    """As PostgreSQL is to hold it: U+0001 begins an escape."""
    return text.replace("\1", "\1b").replace("\0", "\1a")


def _from_stored(text: str) -> str:
    return text.replace("\1a", "\0").replace("\1b", "\1")


class InsertNew(Insert):
    """An insert that leaves rows which exist as they are."""

    inherit_cache = True


@compiles(InsertNew)
def _compile_insert_new(element: InsertNew, compiler: SQLCompiler, **options: Any) -> str:
    return f"{compiler.visit_insert(element, **options)} ON CONFLICT DO NOTHING"  # type: ignore[no-untyped-call]


def insert_new(model: type[DeclarativeBase]) -> InsertNew:
    """An insert that leaves rows which exist as they are."""
    # Inline: nothing is asked back about the row, which may be another's.
    return InsertNew(table_of(model)).inline()


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
    target: Table = columns[0].class_.__table__
    primary = {column.key for column in target.primary_key.columns}
    names = [column.key for column in columns]
    # No statement may touch a row twice: the last one counts.
    key = [i for i, name in enumerate(names) if name in primary] if overwrite else []
    given = list({tuple(row[i] for i in key): row for row in rows}.values()) if key else list(rows)
    if not given:
        return
    action = "DO NOTHING"
    if overwrite:
        updates = ", ".join(f"{name} = excluded.{name}" for name in names if name not in primary)
        action = f"({', '.join(sorted(primary))}) DO UPDATE SET {updates}"
    listed = ", ".join(f'"{name}"' for name in names)
    if connection.dialect.name == SQLITE:
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {target.name} ({listed}) VALUES ({marks}) ON CONFLICT {action}"
        connection.exec_driver_sql(statement, [tuple(row) for row in given])
        return
    # One statement for all rows, whose columns are sent as arrays.
    arrays = ", ".join(f"%s::{_array_type(column, connection)}" for column in columns)
    statement = f"INSERT INTO {target.name} ({listed}) SELECT * FROM unnest({arrays}) ON CONFLICT {action}"
    values = zip(*given, strict=True)
    sent = tuple(
        [to_stored(value) for value in data] if isinstance(column.type, AnyText) else list(data)
        for column, data in zip(columns, values, strict=True)
    )
    connection.exec_driver_sql(statement, sent)


def _array_type(column: InstrumentedAttribute[Any], connection: Connection) -> str:
    # Without the collation, which only a column has.
    return f"{column.type.compile(connection.dialect).partition(' COLLATE')[0]}[]"


def table_of(model: type[DeclarativeBase]) -> Table:
    result = model.__table__
    assert isinstance(result, Table)
    return result


def insert_words(connection: Connection, artifact_id: int, text: str) -> None:
    """Make an artifact's text findable; in SQLite triggers have done so."""
    if connection.dialect.name != SQLITE:
        connection.execute(insert(_WORDS), {"artifact_id": artifact_id, "words": _words(text)})


def text_matches(dialect: str, words: Sequence[str]) -> Any:
    """Ids of the artifacts whose text holds every word, as a subquery.

    A word may have several parts, which then follow each other in the text: ``don't``.
    """
    if dialect == SQLITE:
        # Each word is quoted, so that nothing in it is read as query syntax; FTS5 stops at a NUL.
        query = " ".join('"{}"'.format(word.replace('"', '""')) for word in words)
        return select(_SEARCH.c.rowid).where(_SEARCH.c.artifact_search.op("MATCH")(query))
    parts = [found for word in words if (found := _words(word))]
    every = sorted({part for found in parts for part in found})
    if not every:
        # As in SQLite: what holds no word is found nowhere.
        return select(_WORDS.c.artifact_id).where(false())
    all_of_them = func.array_to_string(_WORDS.c.words, " ", type_=Text)
    phrases = [f" {' '.join(found)} " for found in parts if len(found) > 1]
    return select(_WORDS.c.artifact_id).where(
        _WORDS.c.words.contains(every),
        *((literal(" ") + all_of_them + " ").contains(phrase, autoescape=True) for phrase in phrases),
    )


def _words(text: str) -> list[str]:
    """What FTS5's tokenizer makes of a text: runs of letters and digits of any script, in lower case."""
    return [word.lower() for word in _WORD.findall(text.partition("\0")[0])]


def total(column: Any) -> ColumnElement[int]:
    """The sum of a column of integers, 0 without rows; PostgreSQL would make a decimal number of it."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


class values_of(FunctionElement[Any]):  # noqa: N801
    """The values of a JSON array, as rows with a column ``value``."""

    inherit_cache = True
    name = "values_of"


@compiles(values_of)
def _values_of(element: values_of, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **options)})"


@compiles(values_of, "postgresql")
def _values_of_postgres(element: values_of, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_array_elements_text(CAST({compiler.process(element.clauses, **options)} AS JSON))"


def id_list(name: str = "ids") -> Select[int]:
    """Row numbers bound to a statement by `bound_ids`, as a subquery, whatever their number."""
    values = values_of(bindparam(name, type_=Text)).table_valued(column("value", Text))
    return select(cast(values.c.value, BigInteger))


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
