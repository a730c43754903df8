"""The machine: Hypothesis draws the turns, and shrinks what it finds.

What lives here: one rule for each turn. What may not: what happens in a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.stateful.ledger import Policy
from tests.protocol.stateful.play import Play
from tests.protocol.stateful.stage import Stage
from tests.protocol.stateful.turns import POLICY, TURNS, Turns

Method = TypeVar("Method", bound=Callable[..., None])


def drawn(turn: str) -> Callable[[Method], Method]:
    """A rule whose arguments are drawn from what the turn leaves open."""
    choices = {name: st.sampled_from(values) for name, values in TURNS[turn].items()}
    made: Callable[[Method], Method] = rule(**choices)  # type: ignore[call-overload]
    return made


class Machine(RuleBasedStateMachine):
    """`stage` is given by whoever runs it; `tally` counts what happened in all runs."""

    stage: ClassVar[Stage]
    tally: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(self.stage, self.tally)
        self.turns = Turns(self.play)

    def teardown(self) -> None:
        try:
            self.play.come_to_peace()
        finally:
            self.play.close()

    @invariant()
    def the_database_shows_what_ought_to_be(self) -> None:
        self.play.compare()

    @initialize(
        policies=st.lists(st.sampled_from(POLICY), min_size=1, max_size=4),
        started=st.sampled_from((3, 2, 1, 0)),
    )
    def work_has_begun(self, policies: list[Policy], started: int) -> None:
        self.turns.begin(policies, started)

    @drawn("operate")
    def operate(self, **chosen: Any) -> None:
        self.turns.operate(**chosen)

    @drawn("claim")
    def claim(self, **chosen: Any) -> None:
        self.turns.claim(**chosen)

    @drawn("work")
    def work(self, **chosen: Any) -> None:
        self.turns.work(**chosen)

    @drawn("act")
    def act(self, **chosen: Any) -> None:
        self.turns.act(**chosen)

    @drawn("haunt")
    def haunt(self, **chosen: Any) -> None:
        self.turns.haunt(**chosen)

    @drawn("strike")
    def strike(self, **chosen: Any) -> None:
        self.turns.strike(**chosen)

    @drawn("help")
    def help(self, **chosen: Any) -> None:
        self.turns.help(**chosen)

    @drawn("pass_time")
    def pass_time(self, **chosen: Any) -> None:
        self.turns.pass_time(**chosen)

    @drawn("fall_silent")
    def fall_silent(self, **chosen: Any) -> None:
        self.turns.fall_silent(**chosen)
