"""The environment that all parts of a worker share, and the interfaces of its pluggable parts: supervisor link and messenger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, Protocol

from msgspec import Struct, field

from everbeat.config import RecoveryConfig, WorkerConfig, processors
from everbeat.domain.metrics.meters import Meters
from everbeat.domain.recovery.hooks import HookSet
from everbeat.domain.schedule.model import Declared
from everbeat.domain.series import RateCounter
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.domain.task.middleware import Middleware
from everbeat.domain.task.policy import OnCrash, RunIn, StoredPolicy
from everbeat.hints.topics import MessagesWritten
from everbeat.protocol import FromWorker, Welcome
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.runtime.resources import ResourceSet
from everbeat.runtime.sent_counter import SentCounter
from everbeat.runtime.task_scope import Service, TaskScope
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.messages import WorkerMessage

MODES: Final[tuple[RunIn, ...]] = ("async", "thread", "process")


class WorkerPlan(Struct, frozen=True, kw_only=True):
    """The task functions and settings of a worker.

    `task_process_argv` is the command that starts a task process. `stop_grace_s` is how many seconds the code in a task process
    gets between a stop request and SIGKILL. `on_loop_ending` is called when the program ends the worker's event loop. It is set
    only for a worker that must keep running until its owner stops it (see `TaskScope`). `schedules` are those that the app's code declares,
    and `failure_handlers` those of the task functions, by the function's name.
    """

    target: Target
    definitions: Mapping[str, TaskDefinition]
    config: WorkerConfig
    recovery: RecoveryConfig
    queue_priorities: Mapping[str, int] = field(default_factory=dict)
    exception_codes: Mapping[type[BaseException], str] = field(default_factory=dict)
    on_crash: OnCrash = "fail"
    stall_timeout_ms: int | None = None
    task_process_argv: Sequence[str] = ()
    stop_grace_s: float = 0.5
    hooks: HookSet = field(default_factory=HookSet)
    on_loop_ending: Callable[[], None] | None = None
    schedules: Declared | None = None
    middleware: Middleware = Middleware()
    resources: ResourceSet = field(default_factory=ResourceSet)
    failure_handlers: Mapping[str, StoredHandler] = field(default_factory=dict)
    sent: SentCounter = field(default_factory=SentCounter)
    """Counts the tasks that the app sends in this process."""
    meters: Meters | None = None
    """The app's recorder of metrics."""

    @property
    def queues(self) -> Sequence[str] | None:
        """Return the queues to claim from, or None for all queues."""
        return None if self.config.queues is None else tuple(self.config.queues)

    def slots(self, mode: RunIn) -> int:
        """Return how many attempts of this mode can run at once."""
        match mode:
            case "async":
                return self.config.async_concurrency
            case "thread":
                return self.config.thread_concurrency
            case "process":
                return self.config.process_concurrency

    @property
    def solo_slots(self) -> int:
        """Return how many suspects can run at once, each alone in a process.

        All worker processes of a supervisor together run about one suspect per processor.
        """
        return max(1, processors() // self.config.processes)

    def policies(self) -> dict[str, StoredPolicy]:
        """Return, by task name, the policy for tasks without a stored policy. Programs that do not know the function send such tasks."""
        return {
            name: each.options.stored(
                on_crash=self.on_crash,
                stall_timeout_ms=self.stall_timeout_ms,
                handler=self.failure_handlers.get(name),
            )
            for name, each in self.definitions.items()
        }

    def names(self, mode: RunIn) -> tuple[str, ...]:
        """Return the names of the task functions that run in this mode."""
        return tuple(sorted(name for name, each in self.definitions.items() if each.run_in == mode))

    def executors(self) -> dict[str, dict[str, object]]:
        """Return the slots and task functions of each executor, which can show that one executor is busy while others are idle."""
        return {
            mode: {"slots": self.slots(mode), "tasks": names} for mode in MODES if (names := self.names(mode))
        }

    def parameters(self) -> dict[str, object]:
        """Return, by task name, the argument names that the function accepts and those that it requires."""
        return {name: each.codec.accepts.to_json() for name, each in sorted(self.definitions.items())}


class SupervisorLink(Protocol):
    """The link from a worker to its supervisor.

    In the other direction, the owner of the link calls `Worker.obey(message)` for every message from the supervisor. The call must be
    made in the thread of the worker's event loop. From other threads, use `loop.call_soon_threadsafe`.
    """

    def tell(self, message: FromWorker) -> None:
        """Send a message to the supervisor, in order. Called in the loop's thread. Never blocks and never raises."""
        ...


class MessengerService(Service, Protocol):
    """A service that other parts of the worker can wake."""

    wake: asyncio.Event


class Messenger:
    """Delivers messages about tasks to this worker, and publishes the messages in the message outbox.

    The NATS integration implements this interface. The base class handles no messages, so its worker gets hints from the database.
    """

    parts: Sequence[MessengerService] = ()

    @property
    def delivers(self) -> bool:
        """Return whether messages are arriving, so that this worker needs no hints from the database."""
        return False

    def start(self) -> None:
        """Start delivering messages."""

    def written(self, hint: MessagesWritten) -> None:
        """Handle a hint that the outbox might contain messages to publish."""

    def turn_free(self) -> None:
        """Handle a hint that possibly no worker is publishing, so that this worker can take over."""

    def beaten(self) -> None:
        """Extend the messages of running tasks, because the database has acknowledged a heartbeat for this worker."""

    def room_changed(self) -> None:
        """Request messages for the number of tasks that this worker can claim now."""

    def state(self) -> dict[str, Any] | None:
        """Return the messenger's state for operators as JSON-compatible data, or None if the worker uses no messages."""
        return None

    async def leave(self) -> None:
        """Stop receiving and publishing messages, but keep the messages of tasks that this worker is running."""

    async def close(self) -> None:
        """Release all messages that this worker holds."""


class WorkerIdentity:
    """The identity of this worker. It changes only in `adopt`, when a worker that was declared dead gets a new row."""

    worker_id: str
    tree_session: str
    """The `application_name` of the worker's process tree. Each session appends its purpose to this name."""

    def __init__(self, welcome: Welcome) -> None:
        self.adopt(welcome)

    def adopt(self, welcome: Welcome) -> None:
        """Take over the identity in this welcome message."""
        self.worker_id, self.tree_session = welcome.worker_id, welcome.session_name

    @property
    def session_name(self) -> str:
        """Return the `application_name` of the worker's own sessions."""
        return f"{self.tree_session} worker"


class WorkerEnvironment(Struct, frozen=True, kw_only=True, eq=False):
    """The environment that all parts of a worker share.

    `send` dispatches a message to the worker's other parts at once. It must be called in the loop's thread.
    """

    plan: WorkerPlan
    identity: WorkerIdentity
    link: SupervisorLink
    clock: Clock
    random: Random
    events: EventBus
    scope: TaskScope
    claim_session: Session
    """The session for claims and starts."""
    session: Session
    """The session for settlements and all other statements."""
    send: Callable[[WorkerMessage], None]
    rates: RateCounter = field(default_factory=RateCounter)
    """The counts of this worker. The next report to the supervisor takes them."""
