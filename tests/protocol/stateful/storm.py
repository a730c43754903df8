"""A storm: turns drawn by a seed, thick and fast. It shrinks nothing, and finds in seconds whether something is wrong.

What lives here: the drawing. What may not: what happens in a turn.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.protocol.stateful.play import Play
from tests.protocol.stateful.stage import Stage
from tests.protocol.stateful.turns import POLICY, TURNS, Turns

STEPS = 30
WEIGHTS = {
    "operate": 2, "claim": 3, "work": 4, "act": 4, "haunt": 4, "strike": 2, "help": 3, "pass_time": 1, "fall_silent": 3,
}  # fmt: skip


def storm(stage: Stage, seed: int, *, steps: int = STEPS) -> Counter[str]:
    """One run with this seed; answers what happened, or fails as the machine would."""
    random, tally = Random(seed), Counter[str]()
    play = Play(stage, tally)
    try:
        turns = Turns(play)
        turns.begin([random.choice(POLICY) for _ in range(3)], random.choice((0, 1, 3)))
        play.compare()
        for name in random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=steps):
            chosen = {key: random.choice(values) for key, values in TURNS[name].items()}
            getattr(turns, name)(**chosen)
            play.compare()
        play.come_to_peace()
    finally:
        play.close()
    return tally
