"""The state machine: Hypothesis draws the actions and shrinks its findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.protocol.stateful.actions import ACTIONS, POLICY, Actions
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.ledger import Policy
from tests.protocol.stateful.simulation import Simulation

Method = TypeVar("Method", bound=Callable[..., None])


def drawn(turn: str) -> Callable[[Method], Method]:
    """Return a rule whose arguments are drawn from the choices of the action."""
    choices = {name: st.sampled_from(values) for name, values in ACTIONS[turn].items()}
    made: Callable[[Method], Method] = rule(**choices)  # type: ignore[call-overload]
    return made


class Machine(RuleBasedStateMachine):
    """The runner sets `database`; `tally` counts the events of all runs."""

    database: ClassVar[FaultyDatabase]
    tally: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(self.database, self.tally)
        self.actions = Actions(self.simulation)

    def teardown(self) -> None:
        try:
            self.simulation.finish()
        finally:
            self.simulation.close()

    @invariant()
    def database_equals_ledger(self) -> None:
        self.simulation.compare()

    @initialize(
        policies=st.lists(st.sampled_from(POLICY), min_size=1, max_size=4),
        started=st.sampled_from((3, 2, 1, 0)),
    )
    def begin(self, policies: list[Policy], started: int) -> None:
        self.actions.begin(policies, started)

    @drawn("operate")
    def operate(self, **chosen: Any) -> None:
        self.actions.operate(**chosen)

    @drawn("claim")
    def claim(self, **chosen: Any) -> None:
        self.actions.claim(**chosen)

    @drawn("work")
    def work(self, **chosen: Any) -> None:
        self.actions.work(**chosen)

    @drawn("act")
    def act(self, **chosen: Any) -> None:
        self.actions.act(**chosen)

    @drawn("act_as_zombie")
    def act_as_zombie(self, **chosen: Any) -> None:
        self.actions.act_as_zombie(**chosen)

    @drawn("inject_fault")
    def inject_fault(self, **chosen: Any) -> None:
        self.actions.inject_fault(**chosen)

    @drawn("recover_tree")
    def recover_tree(self, **chosen: Any) -> None:
        self.actions.recover_tree(**chosen)

    @drawn("pass_time")
    def pass_time(self, **chosen: Any) -> None:
        self.actions.pass_time(**chosen)

    @drawn("fall_silent")
    def fall_silent(self, **chosen: Any) -> None:
        self.actions.fall_silent(**chosen)
