"""A worker on a test's own loop, with a supervisor that is the test: it says what it likes, and hears what is told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from uuid import UUID, uuid4

import msgspec
import psycopg
from psycopg import Connection, sql
from psycopg.rows import dict_row

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.stall import Stall
from everbeat.domain.states import TaskState
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus, Subscriber, TaskFinished
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.recovery import Recoverer
from everbeat.store import leases, migrating, tasks, workers
from everbeat.store.database import Database
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.wake import Wake
from everbeat.wake.postgres import PostgresWake
from everbeat.wake.silent import SilentWake
from everbeat.worker.attempt import Attempt
from everbeat.worker.conductor import OnLeft
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Beaten, Drain, FromWorker, Held, Stop, Welcome
from everbeat.worker.worker import Worker
from tests.worker.deeds import APP_CODES, DEFINITIONS

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TASK_PROCESS = [sys.executable, str(Path(__file__).parent / "programs" / "task_process.py")]
PATIENCE_S = 30.0


class Stand:
    """One schema, one supervisor row, and the workers of a test. Every method may be called on the loop: statements are short."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.connection: Connection[Any] = target.connect("everbeat test")
        migrating.migrate(self.connection, target)
        self.database = Database(target)
        self.supervisor_id = f"supervisor-{uuid4().hex[:8]}"
        self.register_supervisor(self.supervisor_id)

    def close(self) -> None:
        self.database.close()
        self.connection.close()

    def run(self, statement: Statement[T]) -> T:
        return self.database.run(statement)

    def register_supervisor(self, supervisor_id: str) -> None:
        row = workers.SupervisorRow(
            id=supervisor_id,
            hostname="host",
            pid=1,
            boot_id=None,
            pid_namespace=None,
            process_started=None,
            lock_key=self.target.lock_key(supervisor_id),
            session_name=f"everbeat-{supervisor_id}",
        )
        self.run(workers.register_supervisor(row))

    def welcome(self) -> Welcome:
        worker_id = f"worker-{uuid4().hex[:8]}"
        row = workers.WorkerRow(
            id=worker_id,
            supervisor_id=self.supervisor_id,
            hostname="host",
            pid=2,
            process_started=None,
            queues=None,
        )
        self.run(workers.register_worker(row))
        return Welcome(worker_id, self.supervisor_id, f"everbeat-{self.supervisor_id[-8:]}")

    def send(self, name: str, **args: Any) -> UUID:
        return self.send_with(name, args)

    def send_with(self, name: str, args: Mapping[str, Any] | bytes, **options: Any) -> UUID:
        data = args if isinstance(args, bytes) else msgspec.json.encode(args)
        task = tasks.NewTask(
            id=uuid4(),
            name=name,
            queue=options.pop("queue", "default"),
            priority=options.pop("priority", 0),
            args=data,
            **options,
        )
        sent = self.run(tasks.insert_task(task, channel=self.target.channel))
        assert sent is not None
        return sent

    def send_many(self, name: str, args: list[dict[str, Any]]) -> list[UUID]:
        many = [
            tasks.NewTask(id=uuid4(), name=name, queue="default", priority=0, args=msgspec.json.encode(each))
            for each in args
        ]
        self.run(tasks.insert_tasks(many, channel=self.target.channel))
        return [task.id for task in many]

    def query(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        text = sql.SQL(query).format(schema=sql.Identifier(self.target.schema))  # type: ignore[arg-type]
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(text, parameters).fetchall()

    def task(self, task_id: UUID) -> dict[str, Any]:
        return self.query("select * from {schema}.tasks where id = %s", task_id)[0]

    def states(self) -> dict[str, int]:
        found = self.query("select state, count(*) as n from {schema}.tasks group by state")
        return {row["state"]: row["n"] for row in found}

    def attempts(self, task_id: UUID) -> list[dict[str, Any]]:
        return self.query("select * from {schema}.attempts where task_id = %s order by attempt", task_id)

    def cancel(self, task_id: UUID) -> Any:
        return self.run(tasks.cancel(task_id, channel=self.target.channel, call=uuid4()))

    def recover(self, task_id: UUID, *, action: str = "fail") -> None:
        """Takes a lease away, as a reaper would."""
        (lease,) = self.run(leases.leases_by_id([task_id]))
        order = leases.RecoveryOrder(
            id=lease.id,
            claim_id=lease.claim_id,
            state=lease.state,
            action=action,  # type: ignore[arg-type]
            retry_in_ms=0 if action == "retry" else None,
            outcome="LOST" if lease.state is TaskState.RUNNING else None,
            error=b'{"code": "WORKER_CRASHED"}',
            cause="vanished",
            last_beat_at=lease.last_beat_at,
            noticed_after_ms=1,
        )
        orders = leases.recover([order], noticed_by="age", recovered_by="other", channel=self.target.channel)
        assert len(self.run(orders)) == 1

    @contextmanager
    def holding(self, statement: str) -> Iterator[None]:
        """A transaction of somebody else that does this and stays open."""
        with self.target.connect("somebody else") as connection:
            connection.autocommit = False
            connection.execute(sql.SQL(statement).format(schema=sql.Identifier(self.target.schema)))  # type: ignore[arg-type]
            yield
            connection.rollback()

    def terminate_sessions(self, *, like: str = "everbeat-%") -> int:
        found = self.connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like %s", [like]
        )
        return len(found.fetchall())

    @asynccontextmanager
    async def worker(
        self,
        *,
        wake: Callable[[str], Wake] | None = None,
        recovery: RecoveryConfig | None = None,
        queue_priorities: Mapping[str, int] | None = None,
        task_process_argv: list[str] | None = None,
        beating: bool = True,
        definitions: Mapping[str, TaskDefinition] = DEFINITIONS,
        **config: Any,
    ) -> AsyncIterator[Running]:
        """A running worker; it is drained at the end, and must then leave in order, unless the test made it leave."""
        values = {"process_concurrency": 2, "poll_interval": "5s", "thread_concurrency": 4} | config
        plan = WorkerPlan(
            target=self.target,
            definitions=definitions,
            config=WorkerConfig(**values),
            recovery=recovery or RecoveryConfig(),
            queue_priorities=queue_priorities or {},
            exception_codes=APP_CODES,
            task_process_argv=task_process_argv or TASK_PROCESS,
        )
        running = Running(self, plan, wake=wake or self.postgres_wake)
        async with asyncio.TaskGroup() as group:
            running.begin(group, beating=beating)
            try:
                yield running
            finally:
                await running.end()

    def postgres_wake(self, application_name: str) -> Wake:
        return PostgresWake(lambda: self.target.aconnect(application_name), self.target.channel)

    @staticmethod
    def silent_wake(application_name: str) -> Wake:
        return SilentWake()


class Running:
    """A worker and the ears of its supervisor."""

    def __init__(self, stand: Stand, plan: WorkerPlan, *, wake: Callable[[str], Wake]) -> None:
        self.stand = stand
        self.plan = plan
        self.told: list[FromWorker] = []
        self.events: list[Event] = []
        self.crashes: list[tuple[UUID, UUID, ExitReport]] = []
        self.held: set[UUID] = set()
        self.code: int | None = None
        self.fatal: tuple[str, BaseException] | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._bus = EventBus()
        self._bus.subscribe(self._hear)
        self.worker = Worker(
            plan,
            welcome=stand.welcome(),
            link=self,
            make_wake=wake,
            recover_crashed=self._recover_crashed,
            recover_stalled=self._recover_stalled,
            events=self._bus,
            clock=SystemClock(),
            random=Random(1),
            on_fatal=self._crash,  # the default would end the test run
        )

    @property
    def id(self) -> str:
        return self.worker.id

    def begin(self, group: asyncio.TaskGroup, *, beating: bool) -> None:
        self._task = group.create_task(self._run())
        self._beats = group.create_task(self._beat()) if beating else None

    async def end(self) -> None:
        if self.code is None:
            self.worker.obey(Drain(5_000))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.left()
        except TimeoutError:
            for task in asyncio.all_tasks():
                task.print_stack()
            raise
        finally:
            self._task.cancel()
            if self._beats is not None:
                self._beats.cancel()

    def subscribe(self, subscriber: Subscriber) -> None:
        self._bus.subscribe(subscriber)

    def hush(self) -> None:
        """The supervisor this test plays beats no more."""
        assert self._beats is not None
        self._beats.cancel()

    async def left(self) -> int:
        await self.until(lambda: self.code is not None)
        assert self.code is not None
        return self.code

    async def _run(self) -> None:
        self.code = await self.worker.run()
        self._news.set()

    async def _beat(self) -> None:
        while True:
            self.worker.obey(Beaten(1, SystemClock().monotonic()))
            await asyncio.sleep(0.2)  # the beat of the supervisor this test plays

    def _crash(self, name: str, error: BaseException) -> None:
        self.fatal = (name, error)
        self._news.set()

    def tell(self, message: FromWorker) -> None:
        self.told.append(message)
        if isinstance(message, Held):
            self.held |= {claim_id for _, claim_id in message.added}
            self.held -= set(message.removed)
        self._news.set()

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._news.set)

    async def _recover_crashed(
        self, task_id: UUID, claim_id: UUID, report: ExitReport, on_left: OnLeft
    ) -> None:
        self.crashes.append((task_id, claim_id, report))
        self.stand.recover(task_id)
        self._news.set()

    async def _recover_stalled(self, task_id: UUID, claim_id: UUID, stall: Stall, on_left: OnLeft) -> None:
        session = Session(self.stand.target, "everbeat test stalls")
        recoverer = Recoverer(
            session, self.plan.recovery, channel=self.stand.target.channel, observer_id=lambda: self.id,
            events=self._bus, clock=SystemClock(), random=Random(1),
        )  # fmt: skip
        try:
            await recoverer.recover_stalled(task_id, claim_id, stall, on_left)
        finally:
            await session.drop()
        self._news.set()

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Wait for news that make the condition true; conditions of the outside world are looked at now and then."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert self.fatal is None, self.fatal
                self._news.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self._news.wait()
                except TimeoutError:
                    pass

    async def finished(self, *task_ids: UUID, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until attempts of all these were settled; answers the row of the first."""
        wanted = set(task_ids)
        await self.until(lambda: wanted <= {one.task_id for one in self.finishes()}, timeout_s=timeout_s)
        return self.stand.task(task_ids[0])

    def finishes(self) -> list[TaskFinished]:
        return [event for event in self.events if isinstance(event, TaskFinished)]

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def have_begun(self, *task_ids: UUID) -> bool:
        """Whether the code of these tasks runs: the worker knows it a moment after the database."""
        attempts = [self.worker._table.by_task(each) for each in task_ids]
        return all(attempt is not None and attempt.launched_at > 0 for attempt in attempts)

    def attempt(self, task_id: UUID) -> Attempt:
        """The attempt of this task that the worker holds."""
        found = self.worker._table.by_task(task_id)
        assert found is not None
        return found

    def stop(self) -> None:
        self.worker.obey(Stop())


def connect(url: str) -> Connection[Any]:
    return psycopg.connect(url, autocommit=True)
