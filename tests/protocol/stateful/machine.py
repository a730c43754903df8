"""The machine: producers, workers, zombies, caretakers, operators and faults, in any order, on a real database.

What lives here: the rules, which say who may act next. What may not: what a deed does (`play`) and what it must answer (`deeds`).
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.protocol.stateful.deeds import VERBS, Fate
from tests.protocol.stateful.ledger import Policy
from tests.protocol.stateful.play import Play
from tests.protocol.stateful.stage import Stage

MOST_TASKS = 7
MOST_DEATHS = 4
OPERATIONS = ("send", "send", "cancel", "cancel", "retry", "deadline", "expire", "pause")
WORK = ("claim", "claim", "claim", "start", "start", "beat", "beat", "ask again", "give up the claim")
FAULTS = ("freeze", "kill", "kill a worker", "kill a worker", "outage")

a_policy = st.sampled_from(("crash_again", "crash_again", "listed", "fails"))
a_pick = st.integers(0, 99)
a_fate = st.sampled_from(("answered", "answered", "reply lost", "commit lost"))
a_kind = st.sampled_from((None, None, True, False))
a_moment = st.sampled_from(
    ("nothing", "nothing", "they come back and beat", "they hand over", "they finish", "an operator cancels")
)


class Machine(RuleBasedStateMachine):
    """`stage` is given by whoever runs it; `tally` counts what happened in all runs."""

    stage: ClassVar[Stage]
    tally: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(self.stage, self.tally)
        self.deaths = 0

    def teardown(self) -> None:
        try:
            self.play.come_to_peace()
        finally:
            self.play.close()

    @invariant()
    def the_database_shows_what_ought_to_be(self) -> None:
        self.play.compare()

    # ---- producers and operators --------------------------------------------------------------------------------------

    @initialize(policies=st.lists(a_policy, min_size=1, max_size=4), started=st.sampled_from((3, 2, 1, 0)))
    def work_has_begun(self, policies: list[Policy], started: int) -> None:
        for policy in policies:
            self.play.send(policy, None)
        if started:
            self.play.claim(self.play.trees[0], started, "answered", None)
            self.play.start_held()

    @precondition(lambda self: not self.play.stage.is_down)
    @rule(
        deed=st.sampled_from(OPERATIONS), pick=a_pick, policy=a_policy, serial=st.sampled_from((None, "line"))
    )
    def operate(self, deed: str, pick: int, policy: Policy, serial: str | None) -> None:
        entries = list(self.play.ledger.entries.values())
        entry = entries[pick % len(entries)]
        match deed:
            case "send" if len(entries) < MOST_TASKS:
                self.play.send(policy, serial)
            case "cancel":
                self.play.cancel(entry)
            case "retry":
                self.play.retry(entry)
            case "deadline":
                self.play.deadline(entry)
            case "expire":
                self.play.expire()
            case "pause":
                self.play.pause(not self.play.is_paused)

    # ---- workers and zombies ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.play.workers())
    @rule(deed=st.sampled_from(WORK), pick=a_pick, limit=st.integers(1, 3), fate=a_fate, suspects=a_kind)
    def work(self, deed: str, pick: int, limit: int, fate: Fate, suspects: bool | None) -> None:
        workers = self.play.workers()
        tree = workers[pick % len(workers)]
        match deed:
            case "claim":
                self.play.claim(tree, limit, fate, suspects)
            case "start":
                self.play.start_held()
            case "beat":
                self.play.beat(tree)
            case "ask again" | "give up the claim":
                self.play.resolve_doubt(tree, forget=deed != "ask again")

    @precondition(lambda self: self.play.held())
    @rule(pick=a_pick, verb=st.sampled_from(VERBS), fate=a_fate)
    def act(self, pick: int, verb: str, fate: Fate) -> None:
        """A worker does something with what it believes to hold."""
        held = self.play.held()
        tree, grant = held[pick % len(held)]
        self.play.deeds.perform(grant, verb, fate)
        if fate != "reply lost" and verb not in ("start", "progress", "checkpoint", "check"):
            tree.held.remove(grant)

    @precondition(lambda self: not self.play.stage.is_down and self.play.lost())
    @rule(pick=a_pick, first=st.integers(0, len(VERBS) - 1))
    def haunt(self, pick: int, first: int) -> None:
        """Whoever has lost a claim acts on it all the same, with every verb there is."""
        lost = self.play.lost()
        lost = [grant for grant in lost if self.play.ledger.entries[grant.task].grant is not None] or lost
        for verb in (*VERBS[first:], *VERBS[:first]):
            self.play.deeds.perform(lost[-1 - pick % len(lost)], verb)

    # ---- faults, help and time ----------------------------------------------------------------------------------------

    @rule(fault=st.sampled_from(FAULTS), pick=a_pick, code=st.booleans(), moment=a_moment)
    def strike(self, fault: str, pick: int, code: bool, moment: str) -> None:
        held, alive = self.play.held(), self.play.of("up", "away")
        match fault:
            case "freeze" if held:
                held[pick % len(held)][0].life = "away"
            case "kill" if alive and self.deaths < MOST_DEATHS:
                self.deaths += 1
                alive[pick % len(alive)].die()
            case "kill a worker" if held and self.deaths < MOST_DEATHS:
                self.deaths += 1
                self.play.bury(held[pick % len(held)][0], code=code, moment=moment)
            case "outage":
                self.play.stage.is_down = True
                self.play.pass_time(pick % 6, beats_first=True, first=0)

    @rule(pick=a_pick, proves=st.booleans())
    def help(self, pick: int, proves: bool) -> None:
        self.play.stage.is_down = False
        sick = self.play.of("away", "dead")
        if sick:
            tree = sick[pick % len(sick)]
            if tree.life == "dead":
                self.play.start_anew(tree, proves=proves)
            tree.life = "up"

    @rule(
        seconds=st.sampled_from((1, 2, 4, 6)),
        beats_first=st.booleans(),
        first=st.integers(0, 2),
        moment=a_moment,
    )
    def time_passes(self, seconds: int, beats_first: bool, first: int, moment: str) -> None:
        self.play.stage.meanwhile = self.play.meanwhile(moment)
        self.play.pass_time(seconds, beats_first=beats_first, first=first)
        self.play.stage.meanwhile = None

    @precondition(lambda self: self.play.held())
    @rule(pick=a_pick, first=st.integers(0, 2), moment=a_moment, taken_over=st.booleans())
    def a_holder_falls_silent(self, pick: int, first: int, moment: str, taken_over: bool) -> None:
        """What most of this is about, in one step: it is given up, and others take over."""
        held = self.play.held()
        held[pick % len(held)][0].life = "away"
        self.time_passes(5, True, first, moment)
        if taken_over:
            self.play.take_over()
