"""The possible actions, each with the choices of its arguments."""

from __future__ import annotations

from typing import Any, Final

from tests.protocol.stateful.holder_actions import VERBS, Fate
from tests.protocol.stateful.ledger import Policy
from tests.protocol.stateful.simulation import Simulation

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

# Each action, and the possible values of each of its arguments.
ACTIONS: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "operate": {
        "action": ("send", "send", "cancel", "retry", "deadline", "expire", "pause"), "pick": PICK, "policy": POLICY,
        "serial": (None, "line"),
    },
    "claim": {"pick": PICK, "limit": (1, 2, 3), "fate": FATE, "suspects": (None, None, True, False)},
    "work": {"action": ("start", "start over", "beat", "ask again", "abandon the claim"), "pick": PICK},
    "act": {"pick": PICK, "verb": VERBS, "fate": FATE},
    "act_as_zombie": {"pick": PICK, "first": tuple(range(len(VERBS)))},
    "inject_fault": {
        "fault": ("freeze", "kill", "kill a worker", "kill a worker", "outage"), "pick": PICK, "code": (False, True),
        "moment": MOMENT,
    },
    "recover_tree": {"pick": PICK, "proves": (True, True, False), "dies_after": (None, None, 2, 3, 4)},
    "pass_time": {"seconds": (1, 2, 4), "beats_first": (True, False), "first": FIRST, "moment": MOMENT},
    "fall_silent": {"pick": PICK, "first": FIRST, "moment": MOMENT, "taken_over": (True, False)},
}  # fmt: skip


class Actions:
    """Run actions in a simulation. An action that is impossible now is skipped."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.deaths = 0

    def begin(self, policies: list[Policy], started: int) -> None:
        """Send tasks, and start some of them."""
        for policy in policies:
            self.simulation.send(policy, None)
        if started:
            self.simulation.claim(self.simulation.trees[0], started, "answered", None)
            self.simulation.start_held()

    def operate(self, action: str, pick: int, policy: Policy, serial: str | None) -> None:
        """Act as producers and operators."""
        entries = list(self.simulation.ledger.entries.values())
        entry = entries[pick % len(entries)]
        match action:
            case "send" if len(entries) < MOST_TASKS:
                self.simulation.send(policy, serial)
            case "cancel":
                self.simulation.cancel(entry)
            case "retry":
                self.simulation.retry(entry)
            case "deadline":
                self.simulation.deadline(entry)
            case "expire":
                self.simulation.expire()
            case "pause":
                self.simulation.pause(not self.simulation.is_paused)
            case _:
                pass  # enough was sent

    def claim(self, pick: int, limit: int, fate: Fate, suspects: bool | None) -> None:
        """Let a worker claim."""
        workers = self.simulation.workers()
        self.simulation.claim(workers[pick % len(workers)], limit, fate, suspects)

    def work(self, action: str, pick: int) -> None:
        """Let workers and their supervisors act otherwise."""
        workers = self.simulation.workers()
        tree = workers[pick % len(workers)]
        match action:
            case "start":
                self.simulation.start_held()
            case "start over":
                self.simulation.start_over()
            case "beat":
                self.simulation.beat(tree)
            case _:
                self.simulation.resolve_doubt(tree, forget=action != "ask again")

    def act(self, pick: int, verb: str, fate: Fate) -> None:
        """Let a worker act on a claim that it believes to hold."""
        if held := self.simulation.held():
            tree, grant = held[pick % len(held)]
            self.simulation.holder_actions.perform(grant, verb, fate)
            if fate != "reply lost" and verb not in KEEPING:
                tree.held.remove(grant)

    def act_as_zombie(self, pick: int, first: int) -> None:
        """Let a worker that lost a claim act on it with every statement."""
        lost = self.simulation.lost()
        lost = [
            grant for grant in lost if self.simulation.ledger.entries[grant.task].grant is not None
        ] or lost
        for verb in (*VERBS[first:], *VERBS[:first]) if lost else ():
            self.simulation.holder_actions.perform(lost[-1 - pick % len(lost)], verb)

    def inject_fault(self, fault: str, pick: int, code: bool, moment: str) -> None:
        """Inject a fault; at least one tree always keeps running."""
        held, others = self.simulation.held(), len(self.simulation.of("up")) > 1
        match fault:
            case "freeze" if held and others:
                held[pick % len(held)][0].life = "away"
            case "kill" if others and self.deaths < MOST_DEATHS:
                alive = self.simulation.of("up", "away")
                self.deaths += 1
                alive[pick % len(alive)].die()
            case "kill a worker" if held and self.deaths < MOST_DEATHS:
                self.deaths += 1
                self.simulation.bury(held[pick % len(held)][0], code=code, moment=moment)
            case "outage":
                self.simulation.outage(pick % 6)
            case _:
                pass  # no tree can be hit

    def recover_tree(self, pick: int, proves: bool, dies_after: int | None) -> None:
        """Let a tree return, or restart it."""
        if sick := self.simulation.of("away", "dead"):
            tree = sick[pick % len(sick)]
            if tree.life == "dead":
                self.simulation.restart(tree, proves=proves, dies_after=dies_after)
            else:
                tree.life = "up"

    def pass_time(self, seconds: int, beats_first: bool, first: int, moment: str) -> None:
        """Let every running tree beat and check; `moment`: the event between a check and an act."""
        self.simulation.database.meanwhile = self.simulation.meanwhile(moment)
        self.simulation.pass_time(seconds, beats_first=beats_first, first=first)
        self.simulation.database.meanwhile = None

    def fall_silent(self, pick: int, first: int, moment: str, taken_over: bool) -> None:
        """Let a holder be declared dead and others take over, in one action."""
        held = self.simulation.held()
        if held and len(self.simulation.of("up")) > 1:
            held[pick % len(held)][0].life = "away"
            self.pass_time(3, True, first, moment)
            if taken_over:
                self.simulation.take_over()
