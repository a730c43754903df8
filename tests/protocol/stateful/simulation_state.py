"""The state of a simulation: the database, the trees and the ledger, and the actions of producers and operators."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import uuid4

from everbeat.domain.task.states import TaskState
from everbeat.store import expiry, tasks
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.holder_actions import HolderActions
from tests.protocol.stateful.ledger import POLICIES, TERMINAL, Entry, Grant, Ledger, Policy
from tests.protocol.stateful.parties import StepClock, Tree

TREES = 3


class SimulationState:
    """Three trees and their tasks. `tally` counts events, so that a run without any is recognised."""

    def __init__(self, database: FaultyDatabase, tally: Counter[str]) -> None:
        database.empty()
        self.database = database
        self.tally = tally
        self.loop = asyncio.new_event_loop()
        self.clock = StepClock()
        self.ledger = Ledger()
        self.holder_actions = HolderActions(database, self.ledger, tally)
        self.is_paused = False
        self.trees = [Tree(database, self.clock, number) for number in range(TREES)]

    def close(self) -> None:
        """End the simulation."""
        self.loop.close()

    def of(self, *lives: str) -> list[Tree]:
        """Return the trees in one of these states."""
        return [tree for tree in self.trees if tree.life in lives]

    def workers(self) -> list[Tree]:
        """Return the trees that can use the database."""
        return [] if self.database.is_down else self.of("up")

    def held(self) -> list[tuple[Tree, Grant]]:
        """Return the claims that the workers believe to hold."""
        return [(tree, grant) for tree in self.workers() for grant in tree.held]

    def lost(self) -> list[Grant]:
        """Return the claims that hold nothing any longer."""
        return [grant for grant in self.ledger.grants if not self.ledger.holds(grant)]

    def compare(self) -> None:
        found = {
            row[0]: ((row[1], None if row[2] is None else (row[2], row[3]), *row[4:]))
            for row in self.database.ask(
                """select id, state, claim_id, claimed_by_worker_id, fence, attempt, retry_count, crash_count, loss_count,
                          cancel_requested_at is not null from {schema}.tasks"""
            )
        }
        assert found == {entry.id: entry.shown() for entry in self.ledger.entries.values()}

    def send(self, policy: Policy, serial: str | None) -> None:
        """Send a task twice, as a producer does whose first reply may have been lost."""
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", policy=POLICIES[policy], serial=serial
        )  # fmt: skip
        for _ in range(2):
            inserted = self.database.run(tasks.insert_task(task, channel=self.database.target.channel))
            assert (inserted or self.database.run(tasks.sent_before(task))) == task.id
        self.ledger.entries[task.id] = Entry(task.id, policy, serial)

    def retry(self, entry: Entry) -> None:
        """Retry a task as an operator."""
        answer = self.database.run(tasks.retry(entry.id, channel=self.database.target.channel, call=uuid4()))
        retryable = entry.state in ("FAILED", "CANCELLED", "EXPIRED")
        assert answer == tasks.RetryVerdict(None, TaskState(entry.state), retried=retryable, other=None)
        if answer.retried:
            self.ledger.retried(entry)

    def deadline(self, entry: Entry) -> None:
        """Let the task's good_until pass now."""
        if entry.state not in TERMINAL:
            self.database.ask(
                "update {schema}.tasks set good_until = statement_timestamp() where id = %s", entry.id
            )
            entry.is_late = True

    def cancel(self, entry: Entry) -> None:
        verdict = self.database.run(
            tasks.cancel(entry.id, channel=self.database.target.channel, call=uuid4())
        )
        assert verdict is not None
        if entry.state in TERMINAL:
            assert verdict[0] == entry.state
            return
        entry.cancel = True
        if entry.state != "RUNNING":
            entry.free("CANCELLED")

    def expire(self) -> None:
        expired = self.database.run(expiry.expire(channel=self.database.target.channel))
        gone = {each.id for each in expired}
        late = {
            entry.id for entry in self.ledger.entries.values() if entry.state == "PENDING" and entry.is_late
        }
        assert gone == late
        for task in gone:
            self.ledger.entries[task].free("EXPIRED")

    def pause(self, paused: bool) -> None:
        if paused:
            self.database.run(tasks.pause("task", "work", paused_by="operator", reason=None, call=uuid4()))
        else:
            for standing in self.database.run(tasks.pauses()):
                self.database.run(tasks.resume(standing, channel=self.database.target.channel))
        self.is_paused = paused
