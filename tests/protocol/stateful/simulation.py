"""The simulation: time passes, processes die, observers check and act, and finally everything recovers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.processes import ExitReport
from everbeat.store import workers
from tests.invariants import breaches
from tests.protocol.stateful.ledger import TERMINAL
from tests.protocol.stateful.parties import THRESHOLD_S, Tree
from tests.protocol.stateful.worker_actions import ALL, WorkerActions

ROUNDS = 90


class Simulation(WorkerActions):
    """All actions and faults."""

    def finish(self) -> None:
        """End all faults; every sent task must end, and no lease may be left."""
        self.database.is_down = False
        self.pause(False)
        for tree in self.trees:
            if tree.life == "dead":
                tree.reset()
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
                    self.holder_actions.perform(grant, "start")
                    self.holder_actions.perform(grant, "complete")
                    tree.held.remove(grant)
            self.compare()
        left = [entry for entry in self.ledger.entries.values() if entry.state not in TERMINAL]
        assert left == [], f"stuck although everybody lives: {left}"
        assert breaches(self.database.connection, self.database.target.schema) == []

    def restart(self, tree: Tree, *, proves: bool, dies_after: int | None) -> None:
        """Replace a dead tree by a new one. `proves`: it searches for dead trees of its own machine; `dies_after`: it is
        killed after this many statements."""
        tree.reset()
        if proves:
            self.database.breaks_after = dies_after
            try:
                self.run_service(tree.reconciliation.run())
            except DatabaseUnreachable:
                tree.die()
            self.database.breaks_after = None
            self._absorb(set())

    def bury(self, tree: Tree, *, code: bool, moment: str) -> None:
        buried = tree.worker_id
        held = self.ledger.held_by(buried)
        sharers = sum(entry.state == "RUNNING" and not entry.alone for entry in held)
        tree.new_worker()
        report = ExitReport(pid=1, exit_code=139 if code else None, signal_number=None if code else 9)
        self.database.run(
            workers.bury_workers(
                worker_ids=[buried], how="child_exit", cause=report.cause, signal=report.signal_number
            )
        )
        self.database.meanwhile = self.meanwhile(moment)
        crashed = {
            entry.id for entry in held if entry.state == "RUNNING" and not entry.alone and sharers == 1
        }
        self.run_service(
            tree.recoverer.recover_worker(buried, report, died_at=self.clock.monotonic()), crashed=crashed
        )
        self.database.meanwhile = None

    def outage(self, seconds: int) -> None:
        """Make the database unavailable for this many seconds."""
        self.database.is_down = True
        self.pass_time(seconds, beats_first=True, first=0)
        self.database.is_down = False

    def pass_time(self, seconds: int, *, beats_first: bool, first: int) -> None:
        """Let every running tree beat and check once a second; `first`: the tree that begins."""
        for _ in range(seconds):
            self.second(beats_first=beats_first, first=first)

    def second(self, *, beats_first: bool, first: int) -> None:
        self.clock.now += 1.0
        self.database.ask("update {schema}.turns set taken_until = taken_until - interval '1 second'")
        order = self.trees[first:] + self.trees[:first]
        for tree in order:
            if tree.life != "up":
                tree.muted_s += 1.0
        if beats_first:
            self._all_beat(order)
        for tree in order:
            if tree.life == "up":
                self.run_service(tree.check())
        if not beats_first:
            self._all_beat(order)

    def _all_beat(self, order: list[Tree]) -> None:
        for tree in order:
            if tree.life == "up" and self.database.is_down:
                tree.disturbances += 1
            elif tree.life == "up":
                self.beat(tree)

    def run_service(self, action: Coroutine[Any, Any, Any], *, crashed: set[UUID] | None = None) -> None:
        """Run a recovery service and compare its effects with the ledger."""
        self.loop.run_until_complete(action)
        self._absorb(crashed or set())

    def _absorb(self, crashed: set[UUID]) -> None:
        ended = {
            row[0]
            for row in self.database.ask("select id from {schema}.supervisors where ended_at is not null")
        }
        for tree in self.trees:
            if tree.supervisor_id in ended and not tree.is_ended:
                assert self._is_gone(tree), f"tree {tree.number} lives and was declared dead"
                tree.is_ended = True
                self.tally["declared dead"] += tree.life == "away"
        alive = {tree.worker_id for tree in self.trees if not tree.is_ended and not self._is_gone(tree)}
        free = {row[0] for row in self.database.ask("select id from {schema}.tasks where claim_id is null")}
        for entry in self.ledger.entries.values():
            if entry.grant is not None and entry.id in free:
                assert entry.grant.worker_id not in alive, "the lease of somebody alive was taken"
                self.tally[f"recovered {entry.state}"] += 1
                entry.recovered("crash" if entry.id in crashed else "loss")

    def _is_gone(self, tree: Tree) -> bool:
        return tree.life == "dead" or tree.muted_s >= THRESHOLD_S

    def meanwhile(self, what: str) -> Callable[[], None] | None:
        """Return the action that happens between an observer's check and its act."""
        holder_actions: dict[str, Callable[[], None]] = {
            "they come back and beat": self._come_back_and_beat,
            "they hand over": self._hand_over,
            "they finish": lambda: self._all_running("complete"),
            "an operator cancels": self._cancel_running,
        }
        if what not in holder_actions:
            return None

        def happen() -> None:
            self._absorb(set())
            holder_actions[what]()
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
                self.holder_actions.perform(grant, verb)
                tree.held.remove(grant)

    def _hand_over(self) -> None:
        """Let the judged workers fail with a retry, and others claim and start the same tasks."""
        self._all_running("fail and retry")
        self.take_over()

    def _cancel_running(self) -> None:
        for entry in self.ledger.entries.values():
            if entry.state == "RUNNING":
                self.cancel(entry)
