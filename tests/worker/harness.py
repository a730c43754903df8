"""A harness that runs workers on a test's event loop. The test acts as their supervisor: it sends messages and records the replies."""

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
from everbeat.domain.recovery.decision import Stall
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.states import TaskState
from everbeat.hints import HintSource
from everbeat.hints.postgres import PostgresHintSource
from everbeat.protocol import Beaten, Drain, FromWorker, Held, LeaseKey, Stop, Welcome
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus, Subscriber, TaskFinished
from everbeat.runtime.processes import ExitReport
from everbeat.store import leases, migrating, tasks, workers
from everbeat.store.database import Database
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.worker.attempt import Attempt
from everbeat.worker.attempt_recovery import AttemptRecovery
from everbeat.worker.claim.durations import FEWEST_RUNS
from everbeat.worker.environment import WorkerPlan
from everbeat.worker.worker import Worker
from tests.hints.silent import SilentHintSource
from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TASK_PROCESS = [sys.executable, str(Path(__file__).parent / "programs" / "task_process.py")]
PATIENCE_S = 30.0


class WorkerHarness:
    """A test's schema, supervisor row and workers. The blocking methods can be called on the event loop, because they are fast."""

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

    def retry(self, task_id: UUID) -> Any:
        return self.run(tasks.retry(task_id, channel=self.target.channel, call=uuid4()))

    def recover(self, task_id: UUID, *, action: str = "fail") -> None:
        """Recover the lease of a task, as the reaper would."""
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
        """Run a statement in another session, and keep its transaction open during the block."""
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
        hints: Callable[[str], HintSource] | None = None,
        recovery: RecoveryConfig | None = None,
        queue_priorities: Mapping[str, int] | None = None,
        task_process_argv: list[str] | None = None,
        beating: bool = True,
        definitions: Mapping[str, TaskDefinition] = DEFINITIONS,
        **config: Any,
    ) -> AsyncIterator[Running]:
        """Run a worker during the block. At the end, drain it and check that it exits cleanly, unless the test has stopped it."""
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
        running = Running(self, plan, hints=hints or self.postgres_hints)
        async with asyncio.TaskGroup() as group:
            running.begin(group, beating=beating)
            try:
                yield running
            finally:
                await running.end()

    def postgres_hints(self, application_name: str) -> HintSource:
        return PostgresHintSource(lambda: self.target.aconnect(application_name), self.target.channel)

    @staticmethod
    def silent_hints(application_name: str) -> HintSource:
        return SilentHintSource()


class Running:
    """A running worker, with the messages and events that it has sent to its supervisor."""

    def __init__(
        self, harness: WorkerHarness, plan: WorkerPlan, *, hints: Callable[[str], HintSource]
    ) -> None:
        self.harness = harness
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
        self.welcome = harness.welcome()
        self.worker = Worker(
            plan,
            welcome=self.welcome,
            link=self,
            make_hint_source=hints,
            recover=self._recover,
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

    def stop_heartbeats(self) -> None:
        """Stop the supervisor's heartbeats, which the test sends."""
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
            await asyncio.sleep(0.2)  # the interval of the supervisor's heartbeats, which the test sends

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

    async def _recover(self, lease: LeaseKey, loss: ExitReport | Stall, died_at: float) -> bool:
        if isinstance(loss, ExitReport):
            self.crashes.append((*lease, loss))
            self.harness.recover(lease[0])
            self._news.set()
            return True
        return await self._recover_stalled(lease, loss, died_at)

    async def _recover_stalled(self, lease: LeaseKey, stall: Stall, died_at: float) -> bool:
        environment = ProcessEnvironment(events=self._bus, random=Random(1))
        own = AttemptRecovery(self.plan, welcome=self.welcome, environment=environment)
        is_settled = await own.recover(lease, stall, died_at)
        self._news.set()
        return is_settled

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the condition is true. It is checked after each message and event, and periodically for other changes."""
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
        """Wait until an attempt of each of these tasks has been settled. Return the row of the first task."""
        wanted = set(task_ids)
        await self.until(lambda: wanted <= {one.task_id for one in self.finishes()}, timeout_s=timeout_s)
        return self.harness.task(task_ids[0])

    def finishes(self) -> list[TaskFinished]:
        return [event for event in self.events if isinstance(event, TaskFinished)]

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def have_begun(self, *task_ids: UUID) -> bool:
        """Return whether the worker knows that the code of these tasks is running. The database knows it slightly earlier."""
        attempts = [self.worker._table.by_task(each) for each in task_ids]
        return all(attempt is not None and attempt.launched_at > 0 for attempt in attempts)

    def attempt(self, task_id: UUID) -> Attempt:
        """Return the attempt that the worker holds for this task."""
        found = self.worker._table.by_task(task_id)
        assert found is not None
        return found

    def measured(self, name: str, *, seconds: float = 0.1) -> None:
        """Record in the worker that runs of this function took `seconds` seconds."""
        for pool in self.worker._slots:
            if pool.prefetch and name in pool.names:
                pool.served = frozenset((name,))
                for _ in range(FEWEST_RUNS):
                    pool.pace.ran(name, seconds)

    def stop(self) -> None:
        self.worker.obey(Stop())


def connect(url: str) -> Connection[Any]:
    return psycopg.connect(url, autocommit=True)
