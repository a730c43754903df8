"""Messages by NATS JetStream: what a worker needs before it begins, and what it is told of tasks by.

What lives here: the only place outside `wake` that names NATS, loaded where an app asks for it (see the package).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from everbeat.assembly.blueprint import Blueprint
from everbeat.config import RecoveryConfig
from everbeat.domain.nats_checks import NatsTrouble, StreamFacts
from everbeat.errors import NatsError, NatsUnreachable
from everbeat.store.address import OpenDatabase
from everbeat.store.database import Database
from everbeat.store.messages import relay_state, use_messages
from everbeat.wake.jetstream import JetStream, check
from everbeat.wake.nats_look import look
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from everbeat.worker.courier import Courier
from everbeat.worker.messenger import MakeMessenger, Messenger, Surroundings

_PATIENCE_S: Final = 60.0

_log = logging.getLogger("everbeat.worker")


def prepare_nats(
    blueprint: Blueprint, nats: NatsConfig, opened: OpenDatabase, *, again: bool = False
) -> None:
    """Sees to the stream and turns the message outbox on; not to be called where an event loop runs.

    Raises NatsRefused, and NatsUnreachable where NATS never answered a worker of this schema: a server that is away later is
    a warning, and the work goes on. `again`: the worker takes the place of one that worked, and whatever is wrong is a warning.
    """
    # What turns messages on, the very first time, waits for a moment in which nobody writes tasks, again and again.
    database = Database(opened.target, patience_s=_PATIENCE_S)
    try:
        is_known = database.run(relay_state()) is not None
        try:
            asyncio.run(check(_plan(blueprint, nats), nats))
        except NatsError as problem:
            if not again and not (is_known and isinstance(problem, NatsUnreachable)):
                raise
            _log.warning("nats_away problem=%r", problem.message)
        database.run(use_messages(channel=opened.target.channel))
    finally:
        database.close()


def messenger_of(blueprint: Blueprint, nats: NatsConfig) -> MakeMessenger:
    """What makes the messenger of a worker."""
    plan = _plan(blueprint, nats)

    def make(around: Surroundings) -> Messenger:
        carrier = JetStream(plan, nats, name=around.session_name(), random=around.random)
        return Courier(around, carrier, ack_wait_s=plan.ack_wait_s)

    return make


def look_at_nats(schema: str, nats: NatsConfig, recovery: RecoveryConfig) -> StreamFacts | NatsTrouble:
    """What NATS says of the stream of a schema, within about 5 s; changes nothing, and is not to be called where an event loop runs."""
    plan = StreamPlan(schema, nats, nats.ack_wait_s(recovery))
    try:
        return asyncio.run(look(plan, nats))
    except NatsError as problem:
        return NatsTrouble(
            refused=not isinstance(problem, NatsUnreachable), text=problem.message, fix=problem.fix
        )


def _plan(blueprint: Blueprint, nats: NatsConfig) -> StreamPlan:
    return StreamPlan(blueprint.address.schema, nats, nats.ack_wait_s(blueprint.recovery))
