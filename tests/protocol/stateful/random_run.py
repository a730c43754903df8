"""Random runs: actions drawn by a seed, without shrinking; they find mistakes within seconds."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.protocol.stateful.actions import ACTIONS, POLICY, Actions
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.simulation import Simulation

STEPS = 30
WEIGHTS = {
    "operate": 2, "claim": 3, "work": 4, "act": 4, "act_as_zombie": 4, "inject_fault": 2, "recover_tree": 3, "pass_time": 1, "fall_silent": 3,
}  # fmt: skip


def random_run(database: FaultyDatabase, seed: int, *, steps: int = STEPS) -> Counter[str]:
    """Run once with this seed; return the counted events, or fail as the machine does."""
    random, tally = Random(seed), Counter[str]()
    simulation = Simulation(database, tally)
    try:
        actions = Actions(simulation)
        actions.begin([random.choice(POLICY) for _ in range(3)], random.choice((0, 1, 3)))
        simulation.compare()
        for name in random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=steps):
            chosen = {key: random.choice(values) for key, values in ACTIONS[name].items()}
            getattr(actions, name)(**chosen)
            simulation.compare()
        simulation.finish()
    finally:
        simulation.close()
    return tally
