"""The turns: what may happen next, each with the choices it leaves open.

What lives here: the table of turns, for whoever draws from it: Hypothesis (`machine`), which shrinks what it finds, or a seeded storm
(`storm`). What may not: what a deed does (`play`) and what it must answer (`deeds`).
"""

from __future__ import annotations

from typing import Any, Final

from tests.protocol.stateful.deeds import VERBS, Fate
from tests.protocol.stateful.ledger import Policy
from tests.protocol.stateful.play import Play

MOST_TASKS = 7
MOST_DEATHS = 4
KEEPING = ("start", "progress", "checkpoint", "check")

PICK = tuple(range(60))
FIRST = (0, 1, 2)
POLICY: Final[tuple[Policy, ...]] = ("crash_again", "crash_again", "listed", "fails")
FATE = ("answered", "answered", "reply lost", "commit lost")
MOMENT = (
    "nothing", "nothing", "they come back and beat", "they hand over", "they finish", "an operator cancels",
)  # fmt: skip

# Each turn, and what may be chosen for each of its arguments.
TURNS: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "operate": {
        "deed": ("send", "send", "cancel", "retry", "deadline", "expire", "pause"), "pick": PICK, "policy": POLICY,
        "serial": (None, "line"),
    },
    "claim": {"pick": PICK, "limit": (1, 2, 3), "fate": FATE, "suspects": (None, None, True, False)},
    "work": {"deed": ("start", "start over", "beat", "ask again", "give up the claim"), "pick": PICK},
    "act": {"pick": PICK, "verb": VERBS, "fate": FATE},
    "haunt": {"pick": PICK, "first": tuple(range(len(VERBS)))},
    "strike": {
        "fault": ("freeze", "kill", "kill a worker", "kill a worker", "outage"), "pick": PICK, "code": (False, True),
        "moment": MOMENT,
    },
    "help": {"pick": PICK, "proves": (True, True, False), "dies_after": (None, None, 2, 3, 4)},
    "pass_time": {"seconds": (1, 2, 4), "beats_first": (True, False), "first": FIRST, "moment": MOMENT},
    "fall_silent": {"pick": PICK, "first": FIRST, "moment": MOMENT, "taken_over": (True, False)},
}  # fmt: skip


class Turns:
    """Takes turns in a play. A turn that makes no sense now is passed."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.deaths = 0

    def begin(self, policies: list[Policy], started: int) -> None:
        """Tasks were sent, and some of them are running."""
        for policy in policies:
            self.play.send(policy, None)
        if started:
            self.play.claim(self.play.trees[0], started, "answered", None)
            self.play.start_held()

    def operate(self, deed: str, pick: int, policy: Policy, serial: str | None) -> None:
        """What producers and operators do."""
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
            case _:
                pass  # enough was sent

    def claim(self, pick: int, limit: int, fate: Fate, suspects: bool | None) -> None:
        """A worker claims."""
        workers = self.play.workers()
        self.play.claim(workers[pick % len(workers)], limit, fate, suspects)

    def work(self, deed: str, pick: int) -> None:
        """What workers and their supervisors do besides."""
        workers = self.play.workers()
        tree = workers[pick % len(workers)]
        match deed:
            case "start":
                self.play.start_held()
            case "start over":
                self.play.start_over()
            case "beat":
                self.play.beat(tree)
            case _:
                self.play.resolve_doubt(tree, forget=deed != "ask again")

    def act(self, pick: int, verb: str, fate: Fate) -> None:
        """A worker does something with what it believes to hold."""
        if held := self.play.held():
            tree, grant = held[pick % len(held)]
            self.play.deeds.perform(grant, verb, fate)
            if fate != "reply lost" and verb not in KEEPING:
                tree.held.remove(grant)

    def haunt(self, pick: int, first: int) -> None:
        """Whoever has lost a claim acts on it all the same, with every verb there is."""
        lost = self.play.lost()
        lost = [grant for grant in lost if self.play.ledger.entries[grant.task].grant is not None] or lost
        for verb in (*VERBS[first:], *VERBS[:first]) if lost else ():
            self.play.deeds.perform(lost[-1 - pick % len(lost)], verb)

    def strike(self, fault: str, pick: int, code: bool, moment: str) -> None:
        """A fault; somebody is always left."""
        held, others = self.play.held(), len(self.play.of("up")) > 1
        match fault:
            case "freeze" if held and others:
                held[pick % len(held)][0].life = "away"
            case "kill" if others and self.deaths < MOST_DEATHS:
                alive = self.play.of("up", "away")
                self.deaths += 1
                alive[pick % len(alive)].die()
            case "kill a worker" if held and self.deaths < MOST_DEATHS:
                self.deaths += 1
                self.play.bury(held[pick % len(held)][0], code=code, moment=moment)
            case "outage":
                self.play.outage(pick % 6)
            case _:
                pass  # nobody is there to be struck

    def help(self, pick: int, proves: bool, dies_after: int | None) -> None:
        """Somebody comes back, or is started anew."""
        if sick := self.play.of("away", "dead"):
            tree = sick[pick % len(sick)]
            if tree.life == "dead":
                self.play.start_anew(tree, proves=proves, dies_after=dies_after)
            else:
                tree.life = "up"

    def pass_time(self, seconds: int, beats_first: bool, first: int, moment: str) -> None:
        """Everybody who is up beats and looks; `moment`: what happens between a look and an act."""
        self.play.stage.meanwhile = self.play.meanwhile(moment)
        self.play.pass_time(seconds, beats_first=beats_first, first=first)
        self.play.stage.meanwhile = None

    def fall_silent(self, pick: int, first: int, moment: str, taken_over: bool) -> None:
        """What most of this is about, in one turn: a holder is given up, and others take over."""
        held = self.play.held()
        if held and len(self.play.of("up")) > 1:
            held[pick % len(held)][0].life = "away"
            self.pass_time(3, True, first, moment)
            if taken_over:
                self.play.take_over()
