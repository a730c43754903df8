"""A schema with ordinary rows of every kind, the parties that work on them, and the steps that hostile rows must not stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from everbeat import App
from everbeat.domain.task.policy import StoredPolicy
from everbeat.maintenance.cleanup import Expirer
from everbeat.maintenance.reconciler import Reconciler
from everbeat.maintenance.scheduler import Scheduler
from everbeat.store import diagnosis, leases, lines, workers
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement, decline
from everbeat.store.tasks import BEGINNING, MarkedGroup, MarkedPlace, marked, next_due
from everbeat.worker.workflow_advancer import Advancer
from tests.cli.conftest import Command
from tests.maintenance.pruning import a_pruner
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.hostile import HostileRow, Refused, copies
from tests.store.scheduling import apply, put, start_worker, version
from tests.worker.environments import environment_of

AGAIN: Final = StoredPolicy(on_crash="retry").to_json()
FAST: Final = {
    "runner_heartbeat_interval_ms": 1_000, "claimer_heartbeat_interval_ms": 1_000, "running_stale_threshold_ms": 2_000,
    "claimed_stale_threshold_ms": 2_000, "check_interval_ms": 1_000,
}  # fmt: skip
_MOST_CLAIMS: Final = 200
_FAR: Final = 3_600_000
_UNIQUE: Final = "(1000000 + pg_current_xact_id()::text::bigint % 1000000)"
"""Each copy is inserted by its own transaction, so no two copies get the same number."""
_INDEXABLE: Final = 8_000
"""A task with a longer name or queue cannot become PENDING; the settler of the worker splits its batch, as `work` shows."""
Step = Callable[[], Awaitable[None]]


@dataclass
class Scenario:
    """The ordinary rows (neighbours), grouped by the step that uses them, and the parties."""

    db: StoreHarness
    observer: ManualObserver
    everbeat: Command
    app: App
    waiting: list[UUID] = field(default_factory=list)
    claimed: list[Claimed] = field(default_factory=list)
    running: list[Claimed] = field(default_factory=list)
    orphaned: list[Claimed] = field(default_factory=list)
    ended: list[UUID] = field(default_factory=list)
    late: list[UUID] = field(default_factory=list)
    marked: list[UUID] = field(default_factory=list)
    limited: list[UUID] = field(default_factory=list)
    planted: list[HostileRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def populate(self) -> None:
        """Insert the ordinary rows: a live tree `s1`, a silent one `dead`, tasks in every state, two workflows, records of every kind."""
        self.db.supervisor("me", "m1")
        self.db.supervisor("s1", "w1", "w2")
        self.db.supervisor("dead", "d1")
        self.db.supervisor("lost", "l1")
        self.orphaned = [self.db.running("d1", policy=AGAIN) for _ in range(4)]
        (lost,) = (self.db.running("l1"),)
        self.ended.append(lost.id)
        (lease,) = (each for each in self.db.leases("lost") if each.id == lost.id)
        self.db.recover(lease, "fail")
        self.running = [self.db.running("w1") for _ in range(4)]
        unique = "update {schema}.tasks set unique_key = 'k', unique_for = '1000 milliseconds' where id = %s"
        for each in (self.running[0], self.orphaned[0]):
            self.db.connection.execute(self.db.plain(unique), [each.id])
        for _ in range(4):
            self.db.send()
        self.claimed = self.db.claim("w1", limit=4)
        done = self.db.running("w1")
        self.db.settle(done, "FAILED", error=b'{"code": "X"}')
        self.ended.append(done.id)
        self._records(done.id)
        self.flow = Flow.start(self.db, [task("a"), task("b"), task("c")], after(1, 0) + after(2, 1))
        self.flow.settle_down()
        self.other = Flow.start(self.db, [task("a"), task("b")], after(1, 0))
        self.waiting = [self.db.send() for _ in range(4)]
        self.marked = [self.db.send("older", args=b'{"a": 1}') for _ in range(2)]
        found = self.db.claim("w2", names=["older"])
        self.db.run(decline([(each.id, each.claim_id) for each in found], channel=self.db.target.channel))
        put(self.db, "usual", pause_after_failures=3)
        start_worker(self.db, "w3", version(1, "declared"))
        self.limited = [self.db.send("bounded") for _ in range(4)]
        for text, values in (
            ("insert into {schema}.limits (name, concurrency) values ('usual', 1000)", []),
            ("update {schema}.tasks set gates = array['usual/a'] where id = any(%s)", [self.limited]),
        ):
            self.db.connection.execute(self.db.plain(text), values)
        self.db.run(lines.apply_changes(readers=["bounded"], queues=None, channel=None))
        text = "insert into {schema}.line_changes (line, gates, at) values ('key:other', array['usual/other'], now())"
        self.db.connection.execute(self.db.plain(text))
        self.late = [self.db.send(good_until=datetime.now(UTC) - timedelta(seconds=1)) for _ in range(2)]

    def _records(self, task_id: UUID) -> None:
        for text in (
            "insert into {schema}.steps (task_id, kind, name, attempt) values (%(id)s, 'step', 'charge', 1)",
            "insert into {schema}.signals (id, target, name, value) values (gen_random_uuid(), %(id)s, 'go', '1')",
            "insert into {schema}.message_outbox (task_id, queue, fence, due_at) values (%(id)s, 'default', 0, now())",
            "insert into {schema}.unique_keys (name, key, task_id) values ('work', 'k', %(id)s)",
            "insert into {schema}.pauses (kind, name, paused_by) values ('task', 'other', 'somebody')",
            "insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)"
            " values ('w1', 1, 1, 8, 1000, 1, 1)",
            "insert into {schema}.ticks (schedule, at, outcome, reason) values ('usual', now() - interval '2 hours', 'MISSED', 'LATE')",
        ):
            self.db.connection.execute(self.db.plain(text), {"id": task_id})
        self.db.run(workers.beat("s1", [], draining=False))

    def count(self, name: str, state: str) -> int:
        found = self.db.table("tasks", "name, state")
        return found.count((name, state))

    def plant(self, table: str, *, share: bool) -> None:
        """Store the hostile copies; with `share`, each text and document in one of the templates only."""
        templates = [*self._templates(table)]
        for number, (template, keys) in enumerate(templates):
            made, refused = copies(
                self.db.connection, self.db.target.schema, table, template, keys=keys,
                share=(number, len(templates)) if share else (0, 1),
            )  # fmt: skip
            self.planted += made
            self.refused += refused

    def _templates(self, table: str) -> Iterable[tuple[str, Mapping[str, str]]]:
        fresh = {"id": "gen_random_uuid()"}
        of_ended = f"task_id = '{self.ended[-1]}'"
        match table:
            case "tasks":
                held = fresh | {"claim_id": "gen_random_uuid()"}
                yield f"id = '{self.waiting[0]}'", fresh
                yield f"id = '{self.marked[0]}'", fresh
                yield f"id = '{self.ended[-1]}'", fresh
                yield f"id = '{self.limited[0]}'", fresh
                for lease in (self.orphaned[0], self.running[0], self.claimed[0]):
                    yield f"id = '{lease.id}'", held
            case "supervisors":
                text = {"id": "'v-' || gen_random_uuid()"}
                yield "id = 's1'", text
            case "workers":
                text = {"id": "'v-' || gen_random_uuid()"}
                yield "id = 'w1'", text
                yield "id = 'd1'", text
            case "attempts":
                yield of_ended, {"attempt": f"{_UNIQUE}::integer"}
            case "recoveries":
                yield f"task_id = '{self.ended[0]}'", {}
            case "beats":
                yield "supervisor_id = 's1'", {"seq": _UNIQUE}
            case "steps":
                yield of_ended, {"name": "gen_random_uuid()::text"}
            case "signals":
                yield "name = 'go'", fresh
            case "pauses":
                yield "name = 'other'", {"name": "gen_random_uuid()::text"}
            case "schedules":
                yield "name = 'usual'", {"name": "gen_random_uuid()::text"}
            case "ticks":
                yield "schedule = 'usual'", {"schedule": "gen_random_uuid()::text"}
            case "unique_keys":
                yield "key = 'k'", {"key": "gen_random_uuid()::text"}
            case "schedule_versions":
                yield "owner = 'shop'", {"version": "gen_random_uuid()::text"}
            case "message_outbox" | "worker_states" | "line_changes":
                yield "true", {}
            case "limits":
                yield "name = 'usual'", {"name": "gen_random_uuid()::text"}
            case "gates":
                yield "gate = 'usual/a'", {"gate": "'usual/' || gen_random_uuid()"}
            case "lines":
                yield "gates is not null", {"line": "'limit:' || gen_random_uuid()"}
            case "workflows":
                yield f"id = '{self.flow.id}'", fresh
                yield f"id = '{self.other.id}'", fresh
            case "nodes":
                for number in (0, 1):
                    yield (
                        f"workflow_id = '{self.flow.id}' and number = {number}",
                        {"workflow_id": "gen_random_uuid()"},
                    )
            case "edges":
                yield f"workflow_id = '{self.flow.id}' and parent = 0", {"workflow_id": "gen_random_uuid()"}
            case "outbox":
                self.db.connection.execute(
                    self.db.plain("insert into {schema}.outbox (workflow_id, node) values (%s, -1)"),
                    [self.flow.id],
                )
                yield f"workflow_id = '{self.flow.id}'", {}

    def steps(self) -> list[Step]:
        """Return the steps in the order in which they are tried."""
        return [self.names, *self.work(), self.lists, self.doctor]

    def work(self) -> list[Step]:
        """Return the steps that claim, settle, recover and advance, without the commands."""
        return [
            self.claims, self.marks, self.limits, self.starts, self.settles, self.beats, self.reaps, self.sessions, self.expires, self.sweeps,
            self.workflows, self.reconciles, self.schedules, self.prunes,
        ]  # fmt: skip

    async def claims(self) -> None:
        taken: set[UUID] = set()
        for _ in range(_MOST_CLAIMS):
            some = self.db.claim("w2", limit=100)
            if not some:
                break
            taken |= {each.id for each in some}
            self.claimed += some
        left = [one for one in self.waiting if one not in taken]
        assert not left, (
            f"claims passed over the neighbours {self.described(left)}; stored beside them: {self.stored('tasks')}"
        )

    async def marks(self) -> None:
        """A worker that understands the marked neighbours finds their group and claims them."""
        wanted = self.db.row(self.marked[1], "needs_id")
        groups: list[MarkedGroup] = []
        after: MarkedPlace | None = BEGINNING
        while after is not None:
            page = self.db.run(marked(after, most=200))
            groups += [each for each in page.groups if each.needs_id == wanted]
            after = page.after
        assert {(each.name, each.needs) for each in groups} == {("older", '{"arguments" : ["a"]}')}, (
            f"{groups} for the marked neighbours; {self.stored('tasks')}"
        )
        taken: set[UUID] = set()
        for _ in range(_MOST_CLAIMS):
            some = self.db.claim("w2", limit=100, names=["older"], marked=groups)
            if not some:
                break
            taken |= {each.id for each in some}
        assert set(self.marked) <= taken, (
            f"claims passed over a marked neighbour; stored beside them: {self.stored('tasks')}"
        )

    async def limits(self) -> None:
        """A worker claims the neighbours that have a limit, however broken other lines, gates and changes are."""
        taken: set[UUID] = set()
        for _ in range(_MOST_CLAIMS):
            some = self.db.claim("w2", limit=100, starts=100, names=["bounded"])
            taken |= {each.id for each in some}
            if set(self.limited) <= taken:
                return
        raise AssertionError(f"claims passed over neighbours with a limit; {self.stored()}")

    async def starts(self) -> None:
        for first in range(0, len(self.claimed), 100):
            some = self.claimed[first : first + 100]
            verdicts = self.db.start(*some)
            neighbours = {*self.waiting, *(each.id for each in self.claimed[:4])}
            for each, verdict in zip(some, verdicts, strict=True):
                assert verdict == "started" or each.id not in neighbours, (
                    f"the start of the neighbour {self.described([each.id])} answered {verdict!r}; in its batch: "
                    + self.stored("tasks")
                )
        self.running += self.claimed

    async def settles(self) -> None:
        """Settle the tasks of the workers in mixed batches that include hostile rows."""
        mine = {(row[0], row[1]) for row in self.db.table("tasks", "id, claim_id, state, claimed_by_worker_id, length(name) + length(queue)")
                if row[2] == "RUNNING" and row[3] in ("w1", "w2") and row[4] < _INDEXABLE}  # fmt: skip
        everything = sorted(mine)
        nodes = self.flow.names()
        neighbours = [each.id for each in self.running[:8]]
        for first in range(0, len(everything), 50):
            some = everything[first : first + 50]
            settled = [
                Settlement(id=one, claim_id=claim, outcome="FAILED", error=b'{"code": "X"}', retry_in_ms=_FAR)
                if place % 2 and one not in nodes
                else Settlement(id=one, claim_id=claim, outcome="COMPLETED", result=b"1")
                for place, (one, claim) in enumerate(some)
            ]
            completed = [each for each in settled if each.outcome == "COMPLETED"][::2]
            self.db.run(leases.complete(completed, channel=self.db.target.channel))
            verdicts = self.db.run(leases.settle(settled, channel=self.db.target.channel))
            for each in settled:
                assert verdicts[each.claim_id] != "lost" or each.id not in neighbours, (
                    f"the settle of the neighbour {self.described([each.id])} as {each.outcome} answered 'lost'; in its batch: "
                    + self.stored("tasks")
                )

    async def beats(self) -> None:
        for supervisor in ("me", "s1"):
            beaten = self.db.run(workers.beat(supervisor, [], draining=False, worker_ids=["w1"]))
            assert beaten.seq is not None, (
                f"the beat of {supervisor} changed no row; {self.stored('supervisors', 'workers')}"
            )
        missing = {"me", "s1", "dead"} - {each.supervisor_id for each in self.db.run(workers.watch_beats())}
        assert not missing, f"no beat is seen of {missing}; {self.stored('supervisors', 'beats')}"
        self.db.run(tasks_next_due())

    async def reaps(self) -> None:
        reaper = self.observer.reaper(**FAST)
        for _ in range(60):
            await self.observer.clock.advance(1.0)
            self.observer.beat("me", "s1")
            self._copies_beat()
            await reaper.tick()
            left = [each.id for each in self.orphaned if self.db.row(each.id, "state") == "RUNNING"]
            if not left:
                return
        raise AssertionError(
            f"60 passes of the reaper did not recover the neighbours {self.described(left)}; {self.stored()}"
        )

    def _copies_beat(self) -> None:
        # If the copies were silent, the reaper would see a mass silence and wait.
        text = "update {schema}.supervisors set beat_seq = beat_seq %% 9223372036854775807 + 1 where id not in ('me', 's1', 'dead')"
        self.db.connection.execute(self.db.plain(text), [])

    async def sessions(self) -> None:
        watch = self.observer.session_watch(**FAST)
        for _ in range(3):
            await self.observer.clock.advance(1.0)
            self.observer.beat("me", "s1")
            await watch.tick()

    async def expires(self) -> None:
        await Expirer(self.observer.environment(**FAST)).tick()
        left = [one for one in self.late if self.db.row(one, "state") != "EXPIRED"]
        assert not left, (
            f"the expirer left the late neighbours {self.described(left)}; {self.stored('tasks')}"
        )

    async def sweeps(self) -> None:
        await self.app.asweep_stale_workers(dry_run=True)
        await self.app.asweep_stale_workers()

    async def workflows(self) -> None:
        advancer = Advancer(environment_of(self.observer.session))
        for _ in range(100):
            advancer.advance_soon()
            await advancer.tick()
            claimed = self.db.claim("w1", limit=100)
            self.db.start(*claimed)
            self.flow.end(claimed, lambda name: name)
            if self.flow.state == self.other.state == "COMPLETED":
                return
        raise AssertionError(
            f"100 rounds left the neighbours: workflow {self.flow.id} {self.flow.state} {self.flow.nodes()}, "
            f"workflow {self.other.id} {self.other.state} {self.other.nodes()}; {self.stored()}"
        )

    async def reconciles(self) -> None:
        environment = self.observer.environment(**FAST)
        await Reconciler(environment, transactions=self.observer.session, grace_ms=0).tick()

    async def schedules(self) -> None:
        """The scheduler decides the neighbour's ticks, and the declared schedule of a live worker is stored and decided, too."""
        assert "declared" in apply(self.db), (
            f"the declared schedule was not stored; {self.stored('schedule_versions')}"
        )
        wanted = {"usual", "declared"}
        text = "update {schema}.schedules set decided_to = now() - interval '2 hours' where name = any(%s)"
        self.db.connection.execute(self.db.plain(text), [[*wanted]])
        scheduler = Scheduler(self.observer.environment(**FAST), page=20)
        for _ in range(100):
            await scheduler.tick()
            sent = {row[0] for row in self.db.table("ticks", "schedule, outcome") if row[1] == "SENT"}
            if wanted <= sent:
                return
        raise AssertionError(
            f"100 passes sent no task for {wanted - sent}; {self.stored('schedules', 'ticks')}"
        )

    async def prunes(self) -> None:
        await a_pruner(self.observer).tick()

    async def lists(self) -> None:
        """Run every command that reads, with text and JSON output."""
        ended, worker, flow = str(self.ended[0]), "w1", str(self.flow.id)
        broken = []
        for words, neighbour in (
            (("tasks", "list", "--limit", "100000"), ended), (("workers", "list", "--all", "--limit", "10000"), worker),
            (("workers", "list", "--history", worker), ""), (("queues", "list"), "default"),
            (("recoveries", "list", "--limit", "10000"), ended), (("workflows", "list", "--limit", "10000"), flow), (("tasks", "pauses"), "other"),
            (("tasks", "show", ended), ended), (("explain", ended), ended), (("workflows", "show", flow), flow),
        ):  # fmt: skip
            for more in ((), ("--json",)):
                answer = self.everbeat(*words, *more)
                if answer.code != 0 or neighbour not in answer.out:
                    fault = (
                        "did not show"
                        if answer.code == 0
                        else f"exited with {answer.code} instead of showing"
                    )
                    broken.append(f"`{' '.join(words + more)}` {fault} {neighbour!r}: {answer.err[-500:]}")
        assert not broken, "\n".join([*broken, self.stored()])

    async def names(self) -> None:
        """The examination finds every unusable value."""
        found = Counter((row.table, row.column) for row in self.db.run(diagnosis.bad_rows(most=100_000)))
        query = (
            "select ctid::text from {schema}.tasks where state in ('PENDING', 'CLAIMED', 'RUNNING')"
            " or id in (select id from {schema}.tasks order by id desc limit 2000)"
        )
        read = {row[0] for row in self.db.connection.execute(self.db.plain(query))}
        planted = Counter(
            (row.table, row.column)
            for row in self.planted
            if row.is_broken and (row.table != "tasks" or row.ctid in read)
        )
        unnamed = planted - found
        values = [
            f"{row.table}.{row.column} = {row.value[:60]}"
            for row in self.planted
            if (row.table, row.column) in unnamed and row.is_broken
        ]
        assert not unnamed, f"bad_rows does not name all of: {', '.join(values)}"

    async def doctor(self) -> None:
        found = self.everbeat("doctor", "--json").document["checks"]
        failed = [
            f"{each['code']}: {each['text']}" for each in found if "this check failed to run" in each["text"]
        ]
        assert not failed, "\n".join([*failed, self.stored()])

    def described(self, ids: Iterable[UUID]) -> str:
        """Return each task's id, state and times, for a message."""
        said = (
            f"{one} {self.db.row(one, 'state, claimed_by_worker_id, enqueued_at, good_until')}" for one in ids
        )
        return "; ".join(said)

    def stored(self, *tables: str) -> str:
        """Return the hostile values of these tables (or of all) by table and column, for a message."""
        chosen = [row for row in self.planted if not tables or row.table in tables] or self.planted
        by_column: dict[str, list[str]] = {}
        for row in chosen:
            by_column.setdefault(f"{row.table}.{row.column}", []).append(row.value[:60])
        return "hostile values: " + "; ".join(
            f"{column} = {' | '.join(dict.fromkeys(values))}" for column, values in by_column.items()
        )


def tasks_next_due() -> Any:
    return next_due(names=["work"], queues=None)
