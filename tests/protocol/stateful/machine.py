"""The machine: producers, workers, zombies, caretakers, operators and faults, in any order, on a real database.

What lives here: the rules, the comparison with the ledger after each of them, and the peace at the end in which everything
must come to its end. What may not: what a deed must answer (`deeds`), or what becomes of a task (`ledger`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar
from uuid import UUID, uuid4

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everbeat.runtime.exit_report import ExitReport
from everbeat.store import leases, pauses, tasks, workers
from tests.invariants import breaches
from tests.protocol.stateful.deeds import VERBS, Deeds, Fate
from tests.protocol.stateful.ledger import POLICIES, TERMINAL, Entry, Grant, Ledger, Policy
from tests.protocol.stateful.parties import THRESHOLD_S, StepClock, Tree
from tests.protocol.stateful.stage import Stage

TREES = 3
MOST_TASKS = 7
MOST_DEATHS = 4
ROUNDS = 90

any_tree = st.integers(0, TREES - 1)
any_pick = st.integers(0, 999)
any_fate = st.sampled_from(["answered", "answered", "answered", "reply lost", "commit lost"])
MEANWHILE = (
    "nothing",
    "nothing",
    "they come back and beat",
    "they hand over",
    "they finish",
    "an operator cancels",
)


class Machine(RuleBasedStateMachine):
    """`stage` is given by whoever runs it."""

    stage: ClassVar[Stage]

    def __init__(self) -> None:
        super().__init__()
        self.stage.empty()
        self.loop = asyncio.new_event_loop()
        self.clock = StepClock()
        self.ledger = Ledger()
        self.deeds = Deeds(self.stage, self.ledger)
        self.is_paused = False
        self.deaths = 0
        self.trees: list[Tree] = []

    @initialize(count=st.integers(1, TREES))
    def everybody_registers(self, count: int) -> None:
        self.trees = [Tree(self.stage, self.clock, number) for number in range(TREES)]
        for tree in self.trees[count:]:
            tree.die()

    # ---- producers and operators --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.ledger.entries) < MOST_TASKS and not self.stage.is_down)
    @rule(policy=st.sampled_from(sorted(POLICIES)), serial=st.sampled_from([None, None, "line"]))
    def send(self, policy: Policy, serial: str | None) -> None:
        task = tasks.NewTask(
            id=uuid4(),
            name="work",
            queue="default",
            priority=0,
            args=b"{}",
            policy=POLICIES[policy],
            serial=serial,
        )
        for _ in range(2):  # the reply may be lost: it is sent again
            assert self.stage.run(tasks.insert_task(task, channel=self.stage.target.channel)) is not None
        self.ledger.entries[task.id] = Entry(task.id, policy, serial)

    @precondition(lambda self: self.ledger.entries and not self.stage.is_down)
    @rule(pick=any_pick, deed=st.sampled_from(["cancel", "cancel", "retry", "deadline", "expire", "pause"]))
    def operate(self, pick: int, deed: str) -> None:
        entry = self._picked(pick)
        match deed:
            case "cancel":
                self._cancel(entry)
            case "retry":
                was, done = self.stage.run(
                    tasks.retry(entry.id, channel=self.stage.target.channel, call=uuid4())
                ) or (None, False)
                assert done == (entry.state in ("FAILED", "CANCELLED", "EXPIRED")), f"retry of {was}"
                if done:
                    self.ledger.retried(entry)
            case "deadline" if entry.state not in TERMINAL:
                self.stage.ask(
                    "update {schema}.tasks set good_until = statement_timestamp() where id = %s", entry.id
                )
                entry.is_late = True
            case "expire":
                self._expire()
            case "pause":
                self._pause(not self.is_paused)

    # ---- workers ------------------------------------------------------------------------------------------------------

    @rule(
        tree=any_tree,
        limit=st.integers(1, 3),
        fate=any_fate,
        suspects=st.sampled_from([None, None, True, False]),
    )
    def claim(self, tree: int, limit: int, fate: Fate, suspects: bool | None) -> None:
        if self._works(tree):
            self._claim(self.trees[tree], limit, fate, suspects)

    @rule(tree=any_tree, forget=st.booleans())
    def resolve_doubt(self, tree: int, forget: bool) -> None:
        if self._works(tree):
            self._resolve_doubt(self.trees[tree], forget=forget)

    @rule(tree=any_tree, pick=any_pick, verb=st.sampled_from(VERBS), fate=any_fate)
    def act(self, tree: int, pick: int, verb: str, fate: Fate) -> None:
        """A worker does something with what it believes to hold."""
        me = self.trees[tree]
        if self._works(tree) and me.held:
            grant = me.held[pick % len(me.held)]
            self.deeds.perform(grant, verb, fate)
            if fate != "reply lost" and verb not in ("start", "progress", "checkpoint", "check"):
                me.held.remove(grant)

    @precondition(lambda self: self.ledger.grants and not self.stage.is_down)
    @rule(pick=any_pick, verb=st.sampled_from(VERBS))
    def haunt(self, pick: int, verb: str) -> None:
        """Whoever has lost a claim acts on it all the same."""
        lost = [grant for grant in self.ledger.grants if not self.ledger.holds(grant)]
        if lost:
            self.deeds.perform(lost[-1 - pick % len(lost)], verb)

    @rule(tree=any_tree)
    def beat(self, tree: int) -> None:
        if self._works(tree):
            self._beat(self.trees[tree])

    # ---- faults and help ----------------------------------------------------------------------------------------------

    @rule(tree=any_tree)
    def freeze(self, tree: int) -> None:
        if self.trees[tree].life == "up":
            self.trees[tree].life = "away"

    @rule(tree=any_tree)
    def thaw(self, tree: int) -> None:
        if self.trees[tree].life == "away":
            self.trees[tree].life = "up"

    @precondition(lambda self: self.deaths < MOST_DEATHS and not self.stage.is_down)
    @rule(tree=any_tree)
    def kill(self, tree: int) -> None:
        if self.trees[tree].life != "dead":
            self.deaths += 1
            self.trees[tree].die()

    @precondition(lambda self: not self.stage.is_down)
    @rule(tree=any_tree, proves=st.booleans())
    def start_anew(self, tree: int, proves: bool) -> None:
        me = self.trees[tree]
        if me.life == "dead":
            me.born()
            if proves:
                self._let(me.reconciliation.run())

    @precondition(lambda self: self.deaths < MOST_DEATHS)
    @rule(tree=any_tree, code=st.booleans(), meanwhile=st.sampled_from(["nothing", "an operator cancels"]))
    def worker_dies(self, tree: int, code: bool, meanwhile: str) -> None:
        if self._works(tree):
            self.deaths += 1
            self._bury(self.trees[tree], code=code, meanwhile=meanwhile)

    @rule(down=st.booleans())
    def outage(self, down: bool) -> None:
        self.stage.is_down = down

    @rule(
        seconds=st.integers(1, 4),
        beats_first=st.booleans(),
        first=any_tree,
        meanwhile=st.sampled_from(MEANWHILE),
    )
    def time_passes(self, seconds: int, beats_first: bool, first: int, meanwhile: str) -> None:
        self.stage.meanwhile = self._meanwhile(meanwhile)
        for _ in range(seconds):
            self._second(beats_first=beats_first, first=first)
        self.stage.meanwhile = None

    # ---- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_database_shows_what_ought_to_be(self) -> None:
        found = {
            row[0]: ((row[1], None if row[2] is None else (row[2], row[3]), *row[4:]))
            for row in self.stage.ask(
                """select id, state, claim_id, claimed_by_worker_id, fence, attempt, retry_count, crash_count, loss_count,
                          cancel_requested_at is not null from {schema}.tasks"""
            )
        }
        assert found == {entry.id: entry.shown() for entry in self.ledger.entries.values()}

    def teardown(self) -> None:
        try:
            if self.trees:
                self._come_to_peace()
        finally:
            self.loop.close()

    def _come_to_peace(self) -> None:
        """Everything heals; what was sent must come to its end, and nothing may be left."""
        self.stage.is_down = False
        self._pause(False)
        for tree in self.trees:
            if tree.life == "dead":
                tree.born()
            tree.life = "up"
        for _ in range(ROUNDS):
            if all(entry.state in TERMINAL for entry in self.ledger.entries.values()):
                break
            self._second(beats_first=True, first=0)
            self._expire()
            for tree in self.trees:
                self._resolve_doubt(tree, forget=False)
                self._claim(tree, MOST_TASKS, "answered", None)
                for grant in list(tree.held):
                    self.deeds.perform(grant, "start")
                    self.deeds.perform(grant, "complete")
                    tree.held.remove(grant)
            self.the_database_shows_what_ought_to_be()
        left = [entry for entry in self.ledger.entries.values() if entry.state not in TERMINAL]
        assert left == [], f"stuck although everybody lives: {left}"
        assert breaches(self.stage.connection, self.stage.target.schema) == []

    # ---- how it is done -----------------------------------------------------------------------------------------------

    def _works(self, tree: int) -> bool:
        return self.trees[tree].life == "up" and not self.stage.is_down

    def _picked(self, pick: int) -> Entry:
        entries = list(self.ledger.entries.values())
        return entries[pick % len(entries)]

    def _cancel(self, entry: Entry) -> None:
        verdict = self.stage.run(tasks.cancel(entry.id, channel=self.stage.target.channel))
        assert verdict is not None
        if entry.state in TERMINAL:
            assert verdict[0] == entry.state
            return
        entry.cancel = True
        if entry.state != "RUNNING":
            entry.free("CANCELLED")

    def _expire(self) -> None:
        gone = set(self.stage.run(tasks.expire(channel=self.stage.target.channel)))
        late = {
            entry.id for entry in self.ledger.entries.values() if entry.state == "PENDING" and entry.is_late
        }
        assert gone == late
        for task in gone:
            self.ledger.entries[task].free("EXPIRED")

    def _pause(self, paused: bool) -> None:
        if paused:
            self.stage.run(pauses.pause("task", "work", paused_by="operator", reason=None))
        else:
            self.stage.run(pauses.resume("task", "work", channel=self.stage.target.channel))
        self.is_paused = paused

    def _claim(self, tree: Tree, limit: int, fate: Fate, suspects: bool | None) -> None:
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

    def _resolve_doubt(self, tree: Tree, *, forget: bool) -> None:
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

    def _beat(self, tree: Tree) -> None:
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

    def _bury(self, tree: Tree, *, code: bool, meanwhile: str) -> None:
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
        self.stage.meanwhile = self._meanwhile(meanwhile)
        crashed = {
            entry.id for entry in held if entry.state == "RUNNING" and not entry.alone and sharers == 1
        }
        self._let(
            tree.recoverer.recover_worker(buried, report, died_at=self.clock.monotonic()), crashed=crashed
        )
        self.stage.meanwhile = None

    def _second(self, *, beats_first: bool, first: int) -> None:
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
                self._let(tree.look())
        if not beats_first:
            self._all_beat(order)

    def _all_beat(self, order: list[Tree]) -> None:
        for tree in order:
            if tree.life == "up" and self.stage.is_down:
                tree.disturbances += 1
            elif tree.life == "up":
                self._beat(tree)

    def _let(self, deed: Coroutine[Any, Any, Any], *, crashed: set[UUID] | None = None) -> None:
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
        alive = {tree.worker_id for tree in self.trees if not tree.is_ended and not self._is_gone(tree)}
        free = {row[0] for row in self.stage.ask("select id from {schema}.tasks where claim_id is null")}
        for entry in self.ledger.entries.values():
            if entry.grant is not None and entry.id in free:
                assert entry.grant.worker_id not in alive, "the lease of somebody alive was taken"
                entry.recovered("crash" if entry.id in crashed else "loss")

    def _is_gone(self, tree: Tree) -> bool:
        return tree.life == "dead" or tree.muted_s >= THRESHOLD_S

    def _meanwhile(self, what: str) -> Callable[[], None] | None:
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
            self.the_database_shows_what_ought_to_be()

        return happen

    def _come_back_and_beat(self) -> None:
        for tree in self.trees:
            if tree.life == "away":
                tree.life = "up"
                self._beat(tree)

    def _all_running(self, verb: str) -> None:
        for tree in self.trees:
            for grant in list(tree.held) if tree.life == "away" else []:
                self.deeds.perform(grant, verb)
                tree.held.remove(grant)

    def _hand_over(self) -> None:
        """Those who are judged fail with a retry, and others claim and start the same tasks."""
        self._all_running("fail and retry")
        for tree in self.trees:
            if tree.life == "up":
                self._claim(tree, MOST_TASKS, "answered", None)
                for grant in tree.held:
                    self.deeds.perform(grant, "start")

    def _cancel_running(self) -> None:
        for entry in self.ledger.entries.values():
            if entry.state == "RUNNING":
                self._cancel(entry)
