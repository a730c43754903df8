"""A random mixture of all statements that touch lines and gates, with lost replies and terminated connections."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import psycopg

from everbeat.store import claims, expiry, leases, lines, steps, tasks, workers
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement, compose
from everbeat.store.tasks import BEGINNING, MarkedGroup
from tests.invariants import line_breaches
from tests.store.conftest import StoreHarness
from tests.store.lining import SEND, parameters, put_limit

T = TypeVar("T")
LIMITS: dict[str, dict[str, Any]] = {
    "stripe": {"concurrency": 5}, "tenant": {"concurrency": 2, "fair": True, "weights": '{"1": 3}'},
    "rate": {"starts": 100, "period_s": 1.0, "burst": 8}, "slide": {"starts": 12, "period_s": 0.5, "sliding": True},
    "both": {"concurrency": 4, "starts": 250, "period_s": 1.0, "burst": 4}, "vary": {"concurrency": 6}, "wide": {"concurrency": 6},
}  # fmt: skip
GATES: tuple[tuple[tuple[str, ...], tuple[int, ...] | None], ...] = (
    ((), None), (("stripe",), None), (("tenant/{k}",), None), (("stripe", "tenant/{k}"), None), (("rate",), None), (("slide",), None),
    (("both", "tenant/{k}"), None), (("rate", "stripe", "tenant/{k}"), None), (("vary",), None), (("vary", "stripe"), None),
    (("wide",), None), (("wide",), (2,)), (("wide", "stripe"), (3, 2)), (("wide", "vary"), (4, 1)), (("slide",), (3,)),
)  # fmt: skip
NAMES, FOREIGN = ("f", "g"), "foreign"
CLAIMERS, SENDERS = 4, 2
DEAD_AFTER_S = 0.3
ENDED = "('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')"
RUNS = """
select x.gate, sum(coalesce(t.costs[x.place], 1)) from {schema}.tasks t cross join unnest(t.gates) with ordinality as x (gate, place)
where t.state in ('CLAIMED', 'RUNNING') group by x.gate
"""


class LineStorm:
    """Runs random statements in threads. `problems` contains each broken rule, and `counts` what was done."""

    def __init__(self, db: StoreHarness, seed: int) -> None:
        self.db, self.seed = db, seed
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.pids: dict[int, int] = {}
        self.connections: list[psycopg.Connection[Any]] = []
        self.is_calm = self.is_over = False
        for name, values in LIMITS.items():
            put_limit(db, name, **values)

    def connect(self) -> psycopg.Connection[Any]:
        connection = self.db.target.connect("everbeat storm")
        connection.execute(KEYED)
        self.connections.append(connection)
        self.pids[threading.get_ident()] = connection.info.backend_pid
        return connection

    def fail(self, problem: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(problem)

    def run(self, seconds: float) -> None:
        """Run all threads for this long, then without faults until every task has ended, and check the rules."""
        jobs = [(self.send, SENDERS), (self.claim, CLAIMERS), (self.meddle, 1), (self.watch, 1)]
        threads = [
            threading.Thread(target=self._guarded, args=(job, f"{self.seed} {job.__name__} {number}", number), daemon=True)
            for job, most in jobs
            for number in range(most)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        time.sleep(seconds)  # the storm's own length
        self.is_calm = True
        put_limit(self.db, "vary", **LIMITS["vary"])
        give_up_at = time.monotonic() + 60 + seconds
        while (left := self.live()) and time.monotonic() < give_up_at and len(self.problems) < 50:
            time.sleep(0.1)  # polls from outside
        if left:
            self.fail(f"{left} tasks never ended")
        self.is_over = True
        for thread in threads:
            thread.join(30)
        for connection in self.connections:
            connection.close()

    def live(self) -> int:
        row = self.db.connection.execute(
            self.db.plain(f"select count(*) from {{schema}}.tasks where state not in {ENDED}")
        ).fetchone()
        assert row is not None
        return int(row[0])

    def _guarded(self, job: Callable[[Random, int], None], seed: str, number: int) -> None:
        try:
            job(Random(seed), number)
        except Exception as problem:  # noqa: BLE001 - every error of a thread is a finding
            self.fail(f"{job.__name__}: {type(problem).__name__}: {problem}")

    def send(self, random: Random, number: int) -> None:
        """Send batches, some in transactions that stay open or are rolled back. Each serial key has one sender, so its order is known."""
        connection = self.connect()
        while not self.is_calm:
            many = random.choice([1, 1, 3, 10])
            try:
                with connection.transaction():
                    for _ in range(many):
                        connection.execute(self.db.plain(SEND), self._task(random, number))
                    if random.random() < 0.15:
                        time.sleep(random.random() * 0.15)  # a transaction of the user
                    if random.random() < 0.07:
                        raise psycopg.Rollback
                self.counts["sent"] += many
            except (psycopg.OperationalError, psycopg.Rollback):
                # A Rollback is raised again if the connection was lost before it.
                connection = self.connect()
            time.sleep(random.random() * 0.05)  # the pace of the storm

    def _task(self, random: Random, number: int) -> dict[str, Any]:
        gates, costs = random.choice(GATES)
        serial = f"key:{number}-{random.randrange(6)}" if random.random() < 0.35 else None
        return parameters(
            [uuid4()], name=random.choice([*NAMES] * 5 + [FOREIGN]), queue=random.choice("ab"), priority=random.choice([0, 5]), serial=serial,
            gates=[gate.format(k=random.randrange(4)) for gate in gates] or None, costs=None if costs is None else list(costs),
            delay_ms=random.choice([0, 0, 0, 100]), good_ms=random.choice([None] * 12 + [200, 2000]),
        )  # fmt: skip

    def again(self, box: list[psycopg.Connection[Any]], statement: Statement[T]) -> T:
        """Run a statement, and repeat it on a new connection until it is answered."""
        while True:
            try:
                cursor = box[0].execute(compose(statement.name, self.db.target.schema), statement.parameters)
                return statement.read(cursor.fetchall())
            except psycopg.errors.DeadlockDetected as problem:
                self.fail(f"{statement.name}: {problem}")
            except (psycopg.OperationalError, psycopg.InterfaceError):
                self.counts["repeated"] += 1
                box[0] = self.connect()

    def claim(self, random: Random, number: int) -> None:
        """Apply changes, claim and end tasks. Sometimes the worker dies with all that it holds, and another one continues."""
        box, worker, known = [self.connect()], f"c{number}", list[MarkedGroup]()
        self.again(box, self._registered(worker))
        while not self.is_over:
            if self.is_calm or random.random() < 0.1:
                known = list(self.again(box, tasks.marked(BEGINNING, most=200)).groups)
            names = [*NAMES, FOREIGN] if self.is_calm else [*NAMES][: random.choice([1, 2, 2])]
            most = random.choice([1, 5, 2000])
            readers = [*names, *{str(group.needs_id) for group in known}]
            self.again(box, lines.apply_changes(readers=readers, queues=None, channel="c", most=most))
            claim = self._claim(random, worker, names, known)
            taken = self.again(box, claim)
            if taken and random.random() < 0.1:
                self._check_repeated(box, claim, taken)
            self.counts["claims"] += 1
            time.sleep(random.random() * 0.01)  # the tasks run
            if taken and not self.is_calm and random.random() < 0.02:
                self.counts["died"] += 1
                worker = f"c{number}-{self.counts['died']}-{uuid4().hex[:4]}"
                self.again(box, self._registered(worker))
                continue
            for one in taken:
                self._end(box, random, one)
            if not taken:
                time.sleep(0.003)  # the pace of an idle worker

    def _registered(self, worker: str) -> Statement[Any]:
        return workers.register_worker(
            workers.WorkerRow(
                id=worker, supervisor_id="s1", hostname="host", pid=2, process_started=None, queues=None
            )
        )

    def _claim(
        self, random: Random, worker: str, names: list[str], known: list[MarkedGroup]
    ) -> Statement[list[Claimed]]:
        limit = random.choice([1, 2, 7, 50])
        return claims.claim(
            worker_id=worker, claim_call=uuid4(), names=names, limit=limit, queues=random.choice([None, None, ["a"], ["a", "b"]]),
            queue_priorities=random.choice([{}, {"a": 1, "b": 2}]), suspects=None if self.is_calm else random.choice([None, False, True]),
            starts=limit if self.is_calm else random.choice([0, 1, limit, limit, limit]), channel="c", marked=known,
            after_queue=random.choice([None, "a", "b"]),
        )  # fmt: skip

    def _check_repeated(
        self, box: list[psycopg.Connection[Any]], claim: Statement[list[Claimed]], taken: list[Claimed]
    ) -> None:
        before = {one.claim_id for one in taken}
        after = {one.claim_id for one in self.again(box, claim)}
        self.counts["claimed twice"] += 1
        if not after <= before and self.again(box, leases.leases_by_id([one.id for one in taken])):
            self.fail(f"a repeated claim returned other tasks: {after - before}")

    def _end(self, box: list[psycopg.Connection[Any]], random: Random, one: Claimed) -> None:
        fate = 1.0 if self.is_calm else random.random()
        self.counts["started"] += 1
        if one.started_at is None:
            if fate < 0.2:
                self.again(box, leases.release([(one.id, one.claim_id)], channel="c"))
                return
            self.again(box, leases.start([(one.id, one.claim_id)], channel="c"))
        if 0.2 < fate < 0.24 and not one.is_marked:
            self.counts["declined"] += 1
            self.again(box, leases.decline([(one.id, one.claim_id)], channel="c"))
            return
        outcome: leases.AttemptOutcome = "COMPLETED"
        more: dict[str, Any] = {}
        if fate < 0.1:
            outcome, more = "FAILED", {"error": b"{}", "retry_in_ms": random.choice([0, 20, 200])}
        elif fate < 0.12:
            outcome, more = "FAILED", {"error": b"{}"}
        elif fate < 0.16:
            outcome = random.choice(["RELEASED", "HANDED_BACK"])  # type: ignore[assignment]
        elif fate < 0.2:
            outcome = "SUSPENDED"
            self.again(
                box, steps.begin_sleep(one.id, one.claim_id, name="s", duration_ms=random.choice([0, 100]))
            )
        settlement = Settlement(id=one.id, claim_id=one.claim_id, outcome=outcome, **more)
        if outcome == "COMPLETED" and self.again(box, leases.complete([settlement], channel="c")):
            return
        self.again(box, leases.settle([settlement], channel="c"))

    def meddle(self, random: Random, _: int) -> None:
        """Act as supervisors, operators and faults."""
        box = [self.connect()]
        while not self.is_over:
            time.sleep(random.random() * 0.05)  # the pace of the storm
            self._recover(box, random)
            self.again(box, expiry.expire(channel="c"))
            for pause in self.again(box, tasks.pauses()):
                self.again(box, tasks.resume(pause, channel="c"))
            if not self.is_calm:
                random.choice(
                    [self._change_task, self._change_task, self._change_limit, self._kill, self._pause]
                )(box, random)

    def _recover(self, box: list[psycopg.Connection[Any]], random: Random) -> None:
        row = box[0].execute("select clock_timestamp()").fetchone()
        assert row is not None
        orders = []
        for lease in self.again(box, leases.leases_of_supervisor("s1", limit=1000)):
            if (row[0] - lease.claimed_at).total_seconds() < DEAD_AFTER_S:
                continue
            is_running = lease.state == "RUNNING"
            action = random.choice(["retry", "retry", "reschedule", "fail"]) if is_running else "requeue"
            self.counts["recovered"] += 1
            orders.append(
                leases.RecoveryOrder(
                    id=lease.id, claim_id=lease.claim_id, state=lease.state, action=action,  # type: ignore[arg-type]
                    cause="vanished", last_beat_at=lease.last_beat_at, noticed_after_ms=1, retry_in_ms=random.choice([0, 50]),
                    outcome="LOST" if is_running else None, error=b'{"code": "WORKER_CRASHED"}', suspect=is_running and random.random() < 0.3,
                )
            )  # fmt: skip
        if orders:
            self.again(box, leases.recover(orders, noticed_by="session", recovered_by="s2", channel="c"))

    def _change_task(self, box: list[psycopg.Connection[Any]], random: Random) -> None:
        found = box[0].execute(
            self.db.plain(
                "select id, state from {schema}.tasks where state in ('PENDING', 'RUNNING', 'FAILED', 'CANCELLED') order by md5(id || %s) limit 4"
            ),
            [str(random.random())],
        )
        for task_id, state in found.fetchall():
            if state in ("FAILED", "CANCELLED"):
                self.counts["retried"] += 1
                self.again(box, tasks.retry(task_id, channel="c", call=uuid4()))
            elif random.random() < 0.4:
                self.counts["cancelled"] += 1
                self.again(box, tasks.cancel(task_id, channel="c", call=uuid4()))
            elif state == "PENDING":
                change = random.choice(
                    ["priority = 5 - priority", "queue = 'a'", "enqueued_at = statement_timestamp()"]
                )
                box[0].execute(
                    self.db.plain(
                        f"update {{schema}}.tasks set {change} where id = %s and state = 'PENDING'"
                    ),
                    [task_id],
                )

    def _change_limit(self, box: list[psycopg.Connection[Any]], random: Random) -> None:
        del box
        put_limit(self.db, "vary", concurrency=random.choice([0, 1, 3, 6]))

    def _pause(self, box: list[psycopg.Connection[Any]], random: Random) -> None:
        kind, name = random.choice([("task", "f"), ("queue", "b")])
        self.again(box, tasks.pause(kind, name, paused_by="storm", reason=None, call=uuid4()))  # type: ignore[arg-type]

    def _kill(self, box: list[psycopg.Connection[Any]], random: Random) -> None:
        own = box[0].info.backend_pid
        pid = random.choice([pid for pid in self.pids.values() if pid != own])
        self.counts["killed"] += 1
        box[0].execute("select pg_terminate_backend(%s)", [pid])

    def watch(self, random: Random, _: int) -> None:
        """Check the rules at random moments, from outside."""
        connection = self.db.target.connect("everbeat watch")
        self.connections.append(connection)
        while not self.is_over:
            for breach in line_breaches(connection, self.db.target.schema, history=False):
                self.fail(f"{breach.rule}: {breach.rows}")
            for gate, units in connection.execute(self.db.plain(RUNS)).fetchall():
                most = LIMITS[gate.partition("/")[0]].get("concurrency")
                if most is not None and units > most:
                    self.fail(f"{units} permits of {gate} are held at once")
            self.counts["looks"] += 1
            time.sleep(random.random() * 0.05)  # the pace of the observer
