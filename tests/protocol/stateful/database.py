"""The database of a simulation: everbeat's statements, with the texts of a mutant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psycopg import Connection, sql

from everbeat.errors import DatabaseUnreachable
from everbeat.store import migrating
from everbeat.store.statement import Statement, parted, shortened, source
from everbeat.store.target import Target
from tests.invariants import install_audit

T = TypeVar("T")

# Between the check and the act of these statements, the world can change.
ACTS = frozenset({"task/recover_leases", "worker/end_supervisor"})
EMPTY = """
    delete from {schema}.tasks; delete from {schema}.attempts; delete from {schema}.recoveries; delete from {schema}.workers;
    delete from {schema}.supervisors; delete from {schema}.beats; delete from {schema}.turns; delete from {schema}.pauses;
    delete from {schema}.audit
"""


@dataclass
class FaultyDatabase:
    """One schema. `mistakes`: for the name of a statement, the text to replace and its replacement."""

    target: Target
    mistakes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    connection: Connection[Any] = field(init=False)
    is_down: bool = False
    meanwhile: Callable[[], None] | None = None
    """Runs right before the next act of a recovery service."""
    breaks_after: int | None = None
    """The number of further statements of recovery services that get a reply; afterwards the caller counts as dead."""

    def __post_init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self.connection = self.target.connect("everbeat test")
        migrating.migrate(self.connection, self.target)
        install_audit(self.connection, self.target.schema)

    def run(self, statement: Statement[T]) -> T:
        """Run one statement, as any party does."""
        cursor = self.connection.execute(self._text(statement.name), statement.parameters)
        return statement.read(cursor.fetchall() if cursor.description else [])

    def run_and_lose(self, statement: Statement[T]) -> T:
        """Run one statement whose reply arrives and whose commit a failover loses."""
        answers: list[T] = []
        with self.connection.transaction(force_rollback=True):
            answers.append(self.run(statement))
        return answers[0]

    def act(self, statement: Statement[T]) -> T:
        """Run one statement of a recovery service."""
        if self.is_down or self.breaks_after == 0:
            raise DatabaseUnreachable("The database is away.", fix="wait.")
        if self.breaks_after is not None:
            self.breaks_after -= 1
        if statement.name in ACTS and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return self.run(statement)

    def ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a query of the simulation itself."""
        cursor = self.connection.execute(self._composed(query), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def empty(self) -> None:
        """Delete all rows."""
        self.is_down, self.meanwhile, self.breaks_after = False, None, None
        for one in EMPTY.split(";"):
            self.ask(one)

    def make(self, mistakes: Mapping[str, tuple[str, str]]) -> None:
        """Apply these mistakes to the statements, and no others."""
        for file, (old, _) in mistakes.items():
            # Not where the text is used, because a run with a mistake is expected to fail.
            assert old in source(file), f"{file} no longer holds what the mutant takes out: {old}"
        self.mistakes = mistakes
        self._texts.clear()

    def close(self) -> None:
        """Drop the schema."""
        migrating.drop(self.connection, self.target)
        self.connection.close()

    def _text(self, name: str) -> bytes:
        if name not in self._texts:
            file, parts = parted(name)
            text = source(file)
            if file in self.mistakes:
                text = text.replace(*self.mistakes[file])
            self._texts[name] = self._composed(shortened(text, parts=parts))
        return self._texts[name]

    def _composed(self, text: str) -> bytes:
        template = sql.SQL(text)
        return template.format(schema=sql.Identifier(self.target.schema)).as_bytes(None)
