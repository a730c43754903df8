"""Builds the parts of a worker that use NATS JetStream. This module is imported only if NATS is configured."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.domain.doctor.nats import NatsTrouble, StreamFacts
from everbeat.errors import NatsError, NatsUnreachable
from everbeat.nats.inspection import check, find_stream_facts
from everbeat.nats.jetstream import JetStream
from everbeat.nats.messenger import NatsMessenger
from everbeat.nats.options import NatsConfig
from everbeat.nats.stream_plan import StreamPlan
from everbeat.store.address import OpenDatabase
from everbeat.store.database import Database
from everbeat.store.messages import relay_state, use_messages
from everbeat.worker.claim.slots import Slots
from everbeat.worker.environment import Messenger, WorkerEnvironment
from everbeat.worker.leases import LeaseTable
from everbeat.worker.worker import MakeMessenger

_PATIENCE_S: Final = 60.0

_log = logging.getLogger("everbeat.worker")


def prepare_nats(
    nats: NatsConfig, recovery: RecoveryConfig, opened: OpenDatabase, *, is_replacement: bool
) -> MakeMessenger:
    """Create the stream if it is missing, enable the message outbox, and return a function that creates a worker's messenger.

    Do not call this function in a thread whose event loop is running. Raises DatabaseError if the database cannot be used, and
    NatsRefused if the NATS server cannot be used. Raises NatsUnreachable if no NATS server responds and none has ever responded to
    a worker of this schema; later, an unreachable server is only logged. If `is_replacement` is true, every NATS error is only
    logged.
    """
    plan = StreamPlan(opened.target.schema, nats, nats.ack_wait_s(recovery))
    # The first time this statement enables messages, it waits, with retries, until no transaction is writing tasks.
    database = Database(opened.target, patience_s=_PATIENCE_S)
    try:
        is_known = database.run(relay_state()) is not None
        try:
            asyncio.run(check(plan, nats))
        except NatsError as problem:
            if not is_replacement and not (is_known and isinstance(problem, NatsUnreachable)):
                raise
            _log.warning("nats_away problem=%r", problem.message)
        database.run(use_messages(channel=opened.target.channel))
    finally:
        database.close()

    def make(environment: WorkerEnvironment, table: LeaseTable, slots: Slots) -> Messenger:
        transport = JetStream(plan, nats, name=environment.identity.tree_session, random=environment.random)
        return NatsMessenger(environment, transport, table=table, slots=slots, ack_wait_s=plan.ack_wait_s)

    return make


def inspect_nats(schema: str, nats: NatsConfig, recovery: RecoveryConfig) -> StreamFacts | NatsTrouble:
    """Return the facts about the schema's stream within about 5 s, without changing anything. If NATS cannot be used, return the problem.

    Do not call this function in a thread whose event loop is running.
    """
    plan = StreamPlan(schema, nats, nats.ack_wait_s(recovery))
    try:
        return asyncio.run(find_stream_facts(plan, nats))
    except NatsError as problem:
        return NatsTrouble(
            refused=not isinstance(problem, NatsUnreachable), text=problem.message, fix=problem.fix
        )
