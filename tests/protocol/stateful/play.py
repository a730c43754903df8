"""The play: time passes, processes die, observers look and act, and at the end there is peace.

What lives here: what caretakers do and how it is judged, and what happens between their look and their act. What may not: the
order of the turns, which is drawn (`turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.exit_report import ExitReport
from everbeat.store import workers
from tests.invariants import breaches
from tests.protocol.stateful.ledger import TERMINAL
from tests.protocol.stateful.parties import THRESHOLD_S, Tree
from tests.protocol.stateful.work import ALL, Work

ROUNDS = 90


class Play(Work):
    """Everything that happens."""

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

    def _cancel_running(self) -> None:
        for entry in self.ledger.entries.values():
            if entry.state == "RUNNING":
                self.cancel(entry)
