"""The play: what everybody does on the real database when it is their turn, and the comparison with what must hold.

What lives here: the deeds, each with its consequences for the ledger. What may not: the order of the deeds, which is the machine's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID, uuid4

from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.exit_report import ExitReport
from everbeat.store import leases, pauses, tasks, workers
from tests.invariants import breaches
from tests.protocol.stateful.deeds import Deeds, Fate
from tests.protocol.stateful.ledger import POLICIES, TERMINAL, Entry, Grant, Ledger, Policy
from tests.protocol.stateful.parties import THRESHOLD_S, StepClock, Tree
from tests.protocol.stateful.stage import Stage

TREES = 3
ROUNDS = 90
ALL = 100


class Play:
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

    def send(self, policy: Policy, serial: str | None) -> None:
        """A producer sends a task, twice, since the first reply may have been lost."""
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", policy=POLICIES[policy], serial=serial
        )  # fmt: skip
        for _ in range(2):
            assert self.stage.run(tasks.insert_task(task, channel=self.stage.target.channel)) is not None
        self.ledger.entries[task.id] = Entry(task.id, policy, serial)

    def retry(self, entry: Entry) -> None:
        """An operator's retry."""
        answer = self.stage.run(tasks.retry(entry.id, channel=self.stage.target.channel, call=uuid4()))
        assert answer == (entry.state, entry.state in ("FAILED", "CANCELLED", "EXPIRED"))
        if answer[1]:
            self.ledger.retried(entry)

    def deadline(self, entry: Entry) -> None:
        """Its time is up from now on."""
        if entry.state not in TERMINAL:
            self.stage.ask(
                "update {schema}.tasks set good_until = statement_timestamp() where id = %s", entry.id
            )
            entry.is_late = True

    def compare(self) -> None:
        found = {
            row[0]: ((row[1], None if row[2] is None else (row[2], row[3]), *row[4:]))
            for row in self.stage.ask(
                """select id, state, claim_id, claimed_by_worker_id, fence, attempt, retry_count, crash_count, loss_count,
                          cancel_requested_at is not null from {schema}.tasks"""
            )
        }
        assert found == {entry.id: entry.shown() for entry in self.ledger.entries.values()}

    def come_to_peace(self) -> None:
        """Everything heals; what was sent must come to its end, and nothing may be left."""
        self.stage.is_down = False
        self.pause(False)
        for tree in self.trees:
            if tree.life == "dead":
                tree.born()
            tree.life = "up"
        for _ in range(ROUNDS):
            if all(entry.state in TERMINAL for entry in self.ledger.entries.values()):
                break
            self.second(beats_first=True, first=0)
            self.expire()
            for tree in self.trees:
                self.resolve_doubt(tree, forget=False)
                self.claim(tree, ALL, "answered", None)
                for grant in list(tree.held):
                    self.deeds.perform(grant, "start")
                    self.deeds.perform(grant, "complete")
                    tree.held.remove(grant)
            self.compare()
        left = [entry for entry in self.ledger.entries.values() if entry.state not in TERMINAL]
        assert left == [], f"stuck although everybody lives: {left}"
        assert breaches(self.stage.connection, self.stage.target.schema) == []

    def cancel(self, entry: Entry) -> None:
        verdict = self.stage.run(tasks.cancel(entry.id, channel=self.stage.target.channel))
        assert verdict is not None
        if entry.state in TERMINAL:
            assert verdict[0] == entry.state
            return
        entry.cancel = True
        if entry.state != "RUNNING":
            entry.free("CANCELLED")

    def expire(self) -> None:
        gone = set(self.stage.run(tasks.expire(channel=self.stage.target.channel)))
        late = {
            entry.id for entry in self.ledger.entries.values() if entry.state == "PENDING" and entry.is_late
        }
        assert gone == late
        for task in gone:
            self.ledger.entries[task].free("EXPIRED")

    def pause(self, paused: bool) -> None:
        if paused:
            self.stage.run(pauses.pause("task", "work", paused_by="operator", reason=None))
        else:
            self.stage.run(pauses.resume("task", "work", channel=self.stage.target.channel))
        self.is_paused = paused

    def claim(self, tree: Tree, limit: int, fate: Fate, suspects: bool | None) -> None:
        call = uuid4()
        statement = leases.claim(
            worker_id=tree.worker_id, claim_call=call, names=["work"], limit=limit, queues=None, queue_priorities={},
            suspects=suspects,
        )  # fmt: skip
        buried = self.stage.ask(
            "select 1 from {schema}.workers where id = %s and ended_at is not null", tree.worker_id
        )
        eligible = [] if buried or self.is_paused else self.ledger.eligible()
        got = self.stage.run_and_lose(statement) if fate == "commit lost" else self.stage.run(statement)
        assert {one.id for one in got} <= {entry.id for entry in eligible}, (
            "a claim took what was not to be taken"
        )
        assert all(one.suspect == suspects for one in got) or suspects is None
        if suspects is None:
            assert len(got) == min(limit, len(eligible)), "a claim left what was to be taken"
        for one in got:
            if fate == "commit lost":
                grant = Grant(one.id, one, tree.worker_id, call)
                self.ledger.grants.append(grant)
            else:
                grant = self.ledger.claimed(one, tree.worker_id, call)
            (tree.in_doubt if fate == "reply lost" else tree.held).append(grant)

    def resolve_doubt(self, tree: Tree, *, forget: bool) -> None:
        doubtful, tree.in_doubt = tree.in_doubt, []
        for call in dict.fromkeys(grant.call for grant in doubtful if not forget):
            mine = [grant for grant in doubtful if grant.call == call and self.ledger.holds(grant)]
            if not mine:
                continue  # what it took is gone: a repeated call would claim anew
            again = leases.claim(
                worker_id=tree.worker_id,
                claim_call=call,
                names=["work"],
                limit=3,
                queues=None,
                queue_priorities={},
            )
            got = {one.claim_id for one in self.stage.run(again)}
            assert got == {grant.claimed.claim_id for grant in mine}, (
                "a repeated claim answered something else"
            )
            tree.held += mine

    def beat(self, tree: Tree) -> None:
        held = [grant.lease for grant in tree.held]
        answer = self.stage.run(workers.beat(tree.supervisor_id, held, draining=False))
        if tree.is_ended:
            assert answer.seq is None, "somebody who was given up is believed alive"
            tree.register()
            return
        assert answer.seq is not None, "somebody alive was not told that it was given up"
        tree.muted_s = 0.0
        lost = [grant for grant in tree.held if not self.ledger.holds(grant)]
        assert {one[1] for one in answer.lost} == {grant.claimed.claim_id for grant in lost}, (
            "told of other losses"
        )
        tree.held = [grant for grant in tree.held if self.ledger.holds(grant)]
        unsure = {grant.lease for grant in tree.in_doubt}
        known = {grant.lease: grant for grant in self.ledger.grants}
        for task, claim_id, worker_id in answer.phantoms:
            grant = known[task, claim_id]
            if worker_id == tree.worker_id and (task, claim_id) not in unsure:
                self.deeds.perform(grant, "release")
                if self.ledger.holds(grant):
                    self.deeds.perform(grant, "hand back")

    def start_anew(self, tree: Tree, *, proves: bool, dies_after: int | None) -> None:
        """A dead tree's place is taken by a new one. `proves`: it looks who of its own machine is dead; `dies_after`: and is
        killed itself after so many statements."""
        tree.born()
        if proves:
            self.stage.breaks_after = dies_after
            try:
                self.let(tree.reconciliation.run())
            except DatabaseUnreachable:
                tree.die()
            self.stage.breaks_after = None
            self._absorb(set())

    def bury(self, tree: Tree, *, code: bool, moment: str) -> None:
        buried = tree.worker_id
        held = self.ledger.held_by(buried)
        sharers = sum(entry.state == "RUNNING" and not entry.alone for entry in held)
        tree.new_worker()
        report = ExitReport(pid=1, exit_code=139 if code else None, signal_number=None if code else 9)
        self.stage.run(
            workers.bury_workers(
                worker_ids=[buried], how="child_exit", cause=report.cause, signal=report.signal_number
            )
        )
        self.stage.meanwhile = self.meanwhile(moment)
        crashed = {
            entry.id for entry in held if entry.state == "RUNNING" and not entry.alone and sharers == 1
        }
        self.let(
            tree.recoverer.recover_worker(buried, report, died_at=self.clock.monotonic()), crashed=crashed
        )
        self.stage.meanwhile = None

    def start_held(self) -> None:
        """Whoever can starts what it has claimed."""
        for _, grant in self.held():
            if grant.phase == "claimed":
                self.deeds.perform(grant, "start")

    def start_over(self) -> None:
        """Whoever can gives up what it holds, at no cost or with a retry, and claims again."""
        for tree, grant in self.held():
            self.deeds.perform(grant, "release" if grant.phase == "claimed" else "fail and retry")
            tree.held.remove(grant)
        self.take_over()

    def outage(self, seconds: int) -> None:
        """The database is away for so long."""
        self.stage.is_down = True
        self.pass_time(seconds, beats_first=True, first=0)
        self.stage.is_down = False

    def pass_time(self, seconds: int, *, beats_first: bool, first: int) -> None:
        """Everybody who is up beats and looks once a second; `first`: who begins."""
        for _ in range(seconds):
            self.second(beats_first=beats_first, first=first)

    def second(self, *, beats_first: bool, first: int) -> None:
        self.clock.now += 1.0
        self.stage.ask("update {schema}.turns set taken_until = taken_until - interval '1 second'")
        order = self.trees[first:] + self.trees[:first]
        for tree in order:
            if tree.life != "up":
                tree.muted_s += 1.0
        if beats_first:
            self._all_beat(order)
        for tree in order:
            if tree.life == "up":
                self.let(tree.look())
        if not beats_first:
            self._all_beat(order)

    def _all_beat(self, order: list[Tree]) -> None:
        for tree in order:
            if tree.life == "up" and self.stage.is_down:
                tree.disturbances += 1
            elif tree.life == "up":
                self.beat(tree)

    def let(self, deed: Coroutine[Any, Any, Any], *, crashed: set[UUID] | None = None) -> None:
        """A caretaker acts; what it has done is judged."""
        self.loop.run_until_complete(deed)
        self._absorb(crashed or set())

    def _absorb(self, crashed: set[UUID]) -> None:
        ended = {
            row[0] for row in self.stage.ask("select id from {schema}.supervisors where ended_at is not null")
        }
        for tree in self.trees:
            if tree.supervisor_id in ended and not tree.is_ended:
                assert self._is_gone(tree), f"tree {tree.number} lives and was declared dead"
                tree.is_ended = True
                self.tally["given up"] += tree.life == "away"
        alive = {tree.worker_id for tree in self.trees if not tree.is_ended and not self._is_gone(tree)}
        free = {row[0] for row in self.stage.ask("select id from {schema}.tasks where claim_id is null")}
        for entry in self.ledger.entries.values():
            if entry.grant is not None and entry.id in free:
                assert entry.grant.worker_id not in alive, "the lease of somebody alive was taken"
                self.tally[f"recovered {entry.state}"] += 1
                entry.recovered("crash" if entry.id in crashed else "loss")

    def _is_gone(self, tree: Tree) -> bool:
        return tree.life == "dead" or tree.muted_s >= THRESHOLD_S

    def meanwhile(self, what: str) -> Callable[[], None] | None:
        """What happens between an observer's look and its act."""
        deeds: dict[str, Callable[[], None]] = {
            "they come back and beat": self._come_back_and_beat,
            "they hand over": self._hand_over,
            "they finish": lambda: self._all_running("complete"),
            "an operator cancels": self._cancel_running,
        }
        if what not in deeds:
            return None

        def happen() -> None:
            self._absorb(set())
            deeds[what]()
            self.compare()

        return happen

    def _come_back_and_beat(self) -> None:
        for tree in self.trees:
            if tree.life == "away":
                tree.life = "up"
                self.beat(tree)

    def _all_running(self, verb: str) -> None:
        for tree in self.trees:
            for grant in list(tree.held) if tree.life == "away" else []:
                self.deeds.perform(grant, verb)
                tree.held.remove(grant)

    def _hand_over(self) -> None:
        """Those who are judged fail with a retry, and others claim and start the same tasks."""
        self._all_running("fail and retry")
        self.take_over()

    def take_over(self) -> None:
        """Whoever can claims what there is, and starts it."""
        for tree in self.workers():
            self.claim(tree, ALL, "answered", None)
        self.start_held()

    def _cancel_running(self) -> None:
        for entry in self.ledger.entries.values():
            if entry.state == "RUNNING":
                self.cancel(entry)
