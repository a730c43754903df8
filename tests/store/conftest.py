"""Fixtures: a migrated schema with an audit, one supervisor and two workers, and a harness that acts for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from psycopg import Connection, sql

from everbeat.store import claims, leases, lines, tasks, workers
from everbeat.store.claims import Claimed
from everbeat.store.database import Database
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement, compose
from everbeat.store.target import Target
from tests.invariants import breaches

T = TypeVar("T")


@dataclass
class StoreHarness:
    """Runs statements on a separate connection, as senders, workers and supervisors would."""

    target: Target
    connection: Connection[Any]
    database: Database = field(init=False)

    def __post_init__(self) -> None:
        self.database = Database(self.target)

    def run(self, statement: Statement[T]) -> T:
        return self.database.run(statement)

    def text(self, name: str) -> bytes:
        return compose(name, self.target.schema)

    def plain(self, text: str) -> bytes:
        """Return a test's SQL text with `{schema}` replaced by the name of this schema."""
        return sql.SQL(text).format(schema=sql.Identifier(self.target.schema)).as_bytes(None)  # type: ignore[arg-type]

    def send(self, name: str = "work", **options: Any) -> UUID:
        task = tasks.NewTask(
            id=uuid4(),
            name=name,
            queue=options.pop("queue", "default"),
            priority=options.pop("priority", 0),
            args=options.pop("args", b"{}"),
            **options,
        )
        sent = self.run(tasks.insert_task(task, channel=self.target.channel)) or self.run(
            tasks.sent_before(task)
        )
        assert sent is not None
        return sent

    def claim(
        self,
        worker: str = "w1",
        *,
        limit: int = 10,
        call: UUID | None = None,
        names: Sequence[str] = ("work",),
        **more: Any,
    ) -> list[Claimed]:
        """Apply the changes of lines and claim, as a worker does. By default, tasks with limits are claimed, too."""
        self.run(lines.apply_changes(readers=names, queues=more.get("queues"), channel=self.target.channel))
        return self.run(
            claims.claim(
                worker_id=worker, claim_call=call or uuid4(), names=names, limit=limit,
                queues=more.get("queues"), queue_priorities=more.get("queue_priorities", {}), suspects=more.get("suspects"),
                floors=more.get("floors", claims.NO_FLOORS), marked=more.get("marked", ()), starts=more.get("starts", 0),
                policies=more.get("policies"), channel=self.target.channel, with_lines=more.get("with_lines", True),
            )
        )  # fmt: skip

    def start(self, *claimed: Claimed) -> list[str]:
        verdicts = self.run(
            leases.start([(task.id, task.claim_id) for task in claimed], channel=self.target.channel)
        )
        return [verdicts[task.claim_id].verdict for task in claimed]

    def running(self, worker: str = "w1", **options: Any) -> Claimed:
        self.send(**options)
        (claimed,) = self.claim(worker, limit=1)
        assert self.start(claimed) == ["started"]
        return claimed

    def settle(self, claimed: Claimed, outcome: leases.AttemptOutcome = "COMPLETED", **more: Any) -> str:
        settlement = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome=outcome, **more)
        return self.run(leases.settle([settlement], channel=self.target.channel))[claimed.claim_id]

    def complete(self, *claimed: Claimed, result: bytes = b"1") -> set[UUID]:
        settlements = [
            Settlement(id=one.id, claim_id=one.claim_id, outcome="COMPLETED", result=result)
            for one in claimed
        ]
        return set(self.run(leases.complete(settlements, channel=self.target.channel)))

    def cancel(self, task_id: UUID) -> str:
        verdict = self.run(tasks.cancel(task_id, channel=self.target.channel, call=uuid4()))
        assert verdict is not None
        return verdict[0]

    def recover(self, lease: leases.Lease, action: str, **more: Any) -> list[leases.Recovered]:
        last_beat, noticed_by = more.pop("last_beat", None), more.pop("noticed_by", "age")
        values: dict[str, Any] = {
            "retry_in_ms": 0 if action == "retry" else None,
            "outcome": "LOST" if lease.state == "RUNNING" else None,
            "error": b'{"code": "WORKER_CRASHED"}', "worker_seq": lease.worker_seq,
        }  # fmt: skip
        order = leases.RecoveryOrder(
            id=lease.id, claim_id=lease.claim_id, state=lease.state, action=action,  # type: ignore[arg-type]
            cause="vanished", last_beat_at=lease.last_beat_at, noticed_after_ms=1, **(values | more),
        )  # fmt: skip
        return self.run(
            leases.recover(
                [order],
                noticed_by=noticed_by,
                recovered_by="s2",
                channel=self.target.channel,
                last_beat=last_beat,
            )
        )

    def leases(self, supervisor: str = "s1") -> list[leases.Lease]:
        return self.run(leases.leases_of_supervisor(supervisor, limit=1000))

    def row(self, task_id: UUID, columns: str) -> Any:
        query = sql.SQL("select {} from {}.tasks where id = %s").format(
            sql.SQL(columns), sql.Identifier(self.target.schema)
        )  # type: ignore[arg-type]
        row = self.connection.execute(query, [task_id]).fetchone()
        assert row is not None
        return row[0] if len(row) == 1 else row

    def record(self, table: str, key: str, task_id: UUID) -> dict[str, Any]:
        """Return a whole row of `table` as a dict."""
        query = sql.SQL("select to_jsonb(found) from {}.{} found where {} = %s")
        names = (sql.Identifier(name) for name in (self.target.schema, table, key))
        row = self.connection.execute(query.format(*names), [task_id]).fetchone()
        assert row is not None
        return dict(row[0])

    def table(self, name: str, columns: str = "*") -> list[Any]:
        query = sql.SQL("select {} from {}.{}").format(
            sql.SQL(columns), sql.Identifier(self.target.schema), sql.Identifier(name)
        )  # type: ignore[arg-type]
        return self.connection.execute(query).fetchall()

    def supervisor(self, supervisor: str, *names: str) -> None:
        self.run(
            workers.register_supervisor(
                workers.SupervisorRow(
                    id=supervisor, hostname="host", pid=1, boot_id=None, pid_namespace=None, process_started=None,
                    lock_key=self.target.lock_key(supervisor), session_name=f"everbeat-{supervisor}",
                )
            )
        )  # fmt: skip
        for name in names:
            row = workers.WorkerRow(
                id=name, supervisor_id=supervisor, hostname="host", pid=2, process_started=None, queues=None
            )
            self.run(workers.register_worker(row))


@pytest.fixture
def db(migrated: Target) -> Iterator[StoreHarness]:
    connection = migrated.connect("everbeat test")
    party = StoreHarness(migrated, connection)
    party.supervisor("s1", "w1", "w2")
    yield party
    assert breaches(connection, migrated.schema) == []
    party.database.close()
    connection.close()
