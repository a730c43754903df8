"""The cast: the database, the trees and the ledger, and what producers and operators do.

What lives here: who is there, and the comparison of what is with what must be. What may not: workers at work (`work`), time and
death (`play`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import uuid4

from everbeat.store import pauses, tasks
from tests.protocol.stateful.deeds import Deeds
from tests.protocol.stateful.ledger import POLICIES, TERMINAL, Entry, Grant, Ledger, Policy
from tests.protocol.stateful.parties import StepClock, Tree
from tests.protocol.stateful.stage import Stage

TREES = 3


class Cast:
    """Three trees and their tasks. `tally` counts what happened, so that an empty run is known as one."""

    def __init__(self, stage: Stage, tally: Counter[str]) -> None:
        stage.empty()
        self.stage = stage
        self.tally = tally
        self.loop = asyncio.new_event_loop()
        self.clock = StepClock()
        self.ledger = Ledger()
        self.deeds = Deeds(stage, self.ledger, tally)
        self.is_paused = False
        self.trees = [Tree(stage, self.clock, number) for number in range(TREES)]

    def close(self) -> None:
        """Nothing more happens."""
        self.loop.close()

    def of(self, *lives: str) -> list[Tree]:
        """The trees that live so."""
        return [tree for tree in self.trees if tree.life in lives]

    def workers(self) -> list[Tree]:
        """The trees that can act on the database."""
        return [] if self.stage.is_down else self.of("up")

    def held(self) -> list[tuple[Tree, Grant]]:
        """What they believe to hold."""
        return [(tree, grant) for tree in self.workers() for grant in tree.held]

    def lost(self) -> list[Grant]:
        """The claims that hold nothing any more."""
        return [grant for grant in self.ledger.grants if not self.ledger.holds(grant)]

    def compare(self) -> None:
        found = {
            row[0]: ((row[1], None if row[2] is None else (row[2], row[3]), *row[4:]))
            for row in self.stage.ask(
                """select id, state, claim_id, claimed_by_worker_id, fence, attempt, retry_count, crash_count, loss_count,
                          cancel_requested_at is not null from {schema}.tasks"""
            )
        }
        assert found == {entry.id: entry.shown() for entry in self.ledger.entries.values()}

    def send(self, policy: Policy, serial: str | None) -> None:
        """A producer sends a task, twice, since the first reply may have been lost."""
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", policy=POLICIES[policy], serial=serial
        )  # fmt: skip
        for _ in range(2):
            inserted = self.stage.run(tasks.insert_task(task, channel=self.stage.target.channel))
            assert (inserted or self.stage.run(tasks.sent_before(task))) == task.id
        self.ledger.entries[task.id] = Entry(task.id, policy, serial)

    def retry(self, entry: Entry) -> None:
        """An operator's retry."""
        answer = self.stage.run(tasks.retry(entry.id, channel=self.stage.target.channel, call=uuid4()))
        assert answer == (None, entry.state, entry.state in ("FAILED", "CANCELLED", "EXPIRED"), None)
        if answer[2]:
            self.ledger.retried(entry)

    def deadline(self, entry: Entry) -> None:
        """Its time is up from now on."""
        if entry.state not in TERMINAL:
            self.stage.ask(
                "update {schema}.tasks set good_until = statement_timestamp() where id = %s", entry.id
            )
            entry.is_late = True

    def cancel(self, entry: Entry) -> None:
        verdict = self.stage.run(tasks.cancel(entry.id, channel=self.stage.target.channel, call=uuid4()))
        assert verdict is not None
        if entry.state in TERMINAL:
            assert verdict[0] == entry.state
            return
        entry.cancel = True
        if entry.state != "RUNNING":
            entry.free("CANCELLED")

    def expire(self) -> None:
        expired = self.stage.run(tasks.expire(channel=self.stage.target.channel))
        gone = set(expired)
        late = {
            entry.id for entry in self.ledger.entries.values() if entry.state == "PENDING" and entry.is_late
        }
        assert gone == late
        for task in gone:
            self.ledger.entries[task].free("EXPIRED")

    def pause(self, paused: bool) -> None:
        if paused:
            self.stage.run(pauses.pause("task", "work", paused_by="operator", reason=None, call=uuid4()))
        else:
            for standing in self.stage.run(pauses.pauses()):
                self.stage.run(pauses.resume(standing, channel=self.stage.target.channel))
        self.is_paused = paused
