"""Build the environment of a worker's part that a test constructs alone."""

from __future__ import annotations

from random import Random
from typing import Any

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.protocol import FromWorker, Welcome
from everbeat.runtime.clock import Clock, SystemClock
from everbeat.runtime.events import EventBus
from everbeat.runtime.task_scope import TaskScope
from everbeat.store.session import Session
from everbeat.worker.environment import WorkerEnvironment, WorkerIdentity, WorkerPlan
from everbeat.worker.messages import WorkerMessage


class Mailbox:
    """Records the messages that a part sends to the worker and to its supervisor."""

    def __init__(self) -> None:
        self.sent: list[WorkerMessage] = []
        self.told: list[FromWorker] = []

    def send(self, message: WorkerMessage) -> None:
        self.sent.append(message)

    def tell(self, message: FromWorker) -> None:
        self.told.append(message)


def environment_of(
    session: Session,
    *,
    mailbox: Mailbox | None = None,
    clock: Clock | None = None,
    plan: WorkerPlan | None = None,
) -> WorkerEnvironment:
    """Return the environment of one part, which uses this session for all its statements."""
    mailbox = Mailbox() if mailbox is None else mailbox
    return WorkerEnvironment(
        plan=WorkerPlan(
            target=session.target, definitions={}, config=WorkerConfig(), recovery=RecoveryConfig()
        )
        if plan is None
        else plan,
        identity=WorkerIdentity(Welcome("worker", "supervisor", "everbeat test")),
        link=mailbox,
        clock=SystemClock() if clock is None else clock,
        random=Random(1),
        events=EventBus(),
        scope=TaskScope(name="test"),
        claim_session=session,
        session=session,
        send=mailbox.send,
    )


NO_REQUESTS: Any = None
"""The request handler of an attempt none of whose code runs."""
