"""Statements compiled once, for what every operation runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa


class Prepared:
    """A statement compiled once, run on the driver itself: SQLAlchemy's own path costs ten times what
    SQLite needs for one of the short statements that every operation runs.

    Args:
        columns: Of an ``INSERT``, those that each call gives.
    """

    def __init__(self, statement: sa.ClauseElement, columns: Sequence[str] | None = None) -> None:
        self._statement, self._columns = statement, columns
        self._compiled: dict[str, _Compiled] = {}

    def run(self, connection: sa.Connection, *calls: Mapping[str, Any]) -> None:
        """Once for each call's parameters."""
        compiled = self._for(connection)
        driver_of(connection).cursor().executemany(compiled.sql, [compiled.bound(call) for call in calls])

    def rows(self, connection: sa.Connection, call: Mapping[str, Any]) -> list[Any]:
        """The rows as plain tuples, so only of columns that the driver itself gives the right type."""
        compiled = self._for(connection)
        return driver_of(connection).execute(compiled.sql, compiled.bound(call)).fetchall()

    def _for(self, connection: sa.Connection) -> _Compiled:
        dialect = connection.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = _Compiled(self._statement, self._columns, dialect)
        return compiled


class _Compiled:
    """A statement in the words of one driver."""

    def __init__(self, statement: sa.ClauseElement, columns: Sequence[str] | None, dialect: sa.Dialect) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        assert isinstance(compiled, sa.sql.compiler.SQLCompiler)
        self.sql = compiled.string
        self._by_place = compiled.positional
        names = (compiled.positiontup or ()) if compiled.positional else compiled.binds
        self._parameters = [
            (name, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names
        ]

    def bound(self, call: Mapping[str, Any]) -> Any:
        """The parameters as the driver takes them: a list by place, or a dictionary by name."""
        values = [call[name] if process is None else process(call[name]) for name, process in self._parameters]
        if self._by_place:
            return values
        return {name: value for (name, _), value in zip(self._parameters, values, strict=True)}


def driver_of(connection: sa.Connection) -> Any:
    """The driver's own connection; both drivers have the methods that are used here."""
    return connection.connection.driver_connection
