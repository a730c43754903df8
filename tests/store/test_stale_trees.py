"""What the statements say of a tree that wrote other thresholds than those of whoever looks: the longer silence decides."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.errors import CheckViolation

from everbeat.config import RecoveryConfig
from everbeat.domain.explanation import SilenceRules
from everbeat.services.thresholds import Thresholds
from everbeat.store import diagnosis, explanation, inspect, messages, sweeping, workers
from tests.store.conftest import Hands

OWN_MS = 2_000
RARE_MS = 20_000
LISTED: dict[str, Any] = {"stale_ms": OWN_MS, "ended_too": False, "limit": 9}
RULES = SilenceRules(
    claimed_ms=OWN_MS,
    running_ms=OWN_MS,
    beat_interval_ms=OWN_MS // 2,
    check_interval_ms=1_000,
    multiplier=1,
    resilient_flags=(),
)


def tree(hands: Hands, supervisor: str, worker: str) -> None:
    """A tree that beats rarely, with a worker."""
    hands.run(
        workers.register_supervisor(
            workers.SupervisorRow(
                id=supervisor, hostname="host", pid=1, boot_id=None, pid_namespace=None, process_started=None,
                lock_key=hands.target.lock_key(supervisor), session_name=f"everbeat-{supervisor}",
                beat_ms=RARE_MS // 2, claimed_stale_ms=RARE_MS, running_stale_ms=RARE_MS,
            )
        )
    )  # fmt: skip
    hands.run(
        workers.register_worker(
            workers.WorkerRow(
                id=worker, supervisor_id=supervisor, hostname="host", pid=2, process_started=None, queues=None,
                metadata='{"tasks": ["work"]}',
            )
        )
    )  # fmt: skip


def age(hands: Hands, seconds: int) -> None:
    """Every tree beat this long ago, and every lease began before that."""
    ago = f"statement_timestamp() - interval '{seconds} s'"
    hands.connection.execute(hands.plain(f"update {{schema}}.supervisors set last_beat_at = {ago}"))
    hands.connection.execute(
        hands.plain(f"update {{schema}}.workers set last_beat_at = {ago}, started_at = {ago}")
    )
    hands.connection.execute(
        hands.plain(
            f"update {{schema}}.tasks set claimed_at = {ago}, started_at = {ago} where claim_id is not null"
        )
    )


def seen(hands: Hands, held: UUID, waits: UUID) -> dict[str, Any]:
    """What each look says of the two trees, one of which holds a task."""
    crew = hands.run(diagnosis.crew(stale_ms=OWN_MS))
    waiting = hands.run(explanation.waiting(waits, stale_ms=OWN_MS))
    holding = hands.run(explanation.holding(held, stale_ms=OWN_MS))
    assert waiting is not None
    assert holding is not None
    silent = hands.run(diagnosis.silent_trees(silent_ms=OWN_MS, stale_ms=OWN_MS))
    unswept = hands.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=OWN_MS))
    return {
        "crew": (crew.supervisors, crew.workers),
        "waiting": waiting.alive,
        "holding": (holding.observers, RULES.is_silent(holding), RULES.threshold_ms(holding)),
        "silent_trees": (silent.silent, silent.living),
        "unswept": unswept.silent,
        "unserved": len(hands.run(diagnosis.unserved(stale_ms=OWN_MS))),
        "knowing": sum(
            len(each.registered.workers) for each in hands.run(diagnosis.knowing(["work"], stale_ms=OWN_MS))
        ),
        "workers": {each.is_stale for each in hands.run(inspect.workers(**LISTED))},
        "supervisors": {each.is_stale for each in hands.run(inspect.supervisors(**LISTED))},
        "known_names": hands.run(explanation.known_names(stale_ms=OWN_MS))[0],
        "movement": hands.run(explanation.movement(uuid4(), stale_ms=OWN_MS)).alive,
        "failing_starts": len(hands.run(explanation.failing_starts(stale_ms=OWN_MS))),
        "messages": hands.run(messages.look_at([held], stale_ms=OWN_MS))[held].stale,
        "sweep": len(hands.run(sweeping.silent_supervisors(silent_ms=OWN_MS))),
    }


ALIVE = {
    "crew": (2, 2), "waiting": 2, "holding": (1, False, RARE_MS), "silent_trees": (0, 2), "unswept": 0, "unserved": 0, "knowing": 2,
    "workers": {False}, "supervisors": {False}, "known_names": ("work",), "movement": 2, "failing_starts": 1, "messages": False, "sweep": 0,
}  # fmt: skip
DEAD = {
    "crew": (0, 0), "waiting": 0, "holding": (0, True, RARE_MS), "silent_trees": (2, 0), "unswept": 1, "unserved": 1, "knowing": 0,
    "workers": {True}, "supervisors": {True}, "known_names": (), "movement": 0, "failing_starts": 0, "messages": True, "sweep": 2,
}  # fmt: skip


def test_every_look_judges_a_tree_by_the_longer_of_both_thresholds(hands: Hands) -> None:  # D1 J1
    hands.run(workers.bury_workers(supervisor_id="s1", how="left"))
    hands.run(workers.end_supervisor("s1", how="left"))
    tree(hands, "holds", "holds-w")
    tree(hands, "looks", "looks-w")
    hands.run(workers.record_starts("looks", processes=1, problem="broken"))
    held, waits = hands.running("holds-w").id, hands.send()
    age(hands, 6)
    assert seen(hands, held, waits) == ALIVE
    beats = hands.run(workers.watch_beats())
    assert [(each.claimed_stale_ms, each.running_stale_ms) for each in beats] == [(RARE_MS, RARE_MS)] * 2
    (lease,) = hands.leases("holds")
    assert (lease.claimed_stale_ms, lease.running_stale_ms) == (RARE_MS, RARE_MS)
    assert {each.is_stale for each in hands.run(inspect.workers(**LISTED, exact=True))} == {True}
    assert {each.is_stale for each in hands.run(inspect.supervisors(**LISTED, exact=True))} == {True}
    assert len(hands.run(sweeping.silent_supervisors(silent_ms=OWN_MS, exact=True))) == 2
    age(hands, 60)
    assert seen(hands, held, waits) == DEAD


def test_a_tree_that_wrote_no_threshold_is_judged_by_whoever_looks(hands: Hands) -> None:  # D1
    held = hands.running("w1").id
    age(hands, 6)
    holding = hands.run(explanation.holding(held, stale_ms=OWN_MS))
    assert holding is not None
    assert (RULES.is_silent(holding), RULES.threshold_ms(holding)) == (True, OWN_MS)
    assert hands.run(diagnosis.crew(stale_ms=OWN_MS)).supervisors == 0
    assert hands.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=OWN_MS)).silent == 1
    (lease,) = hands.leases("s1")
    assert Thresholds.automatic(RecoveryConfig()).of(lease) == 300_000


@pytest.mark.parametrize("column", ["beat_ms", "claimed_stale_ms", "running_stale_ms"])
@pytest.mark.parametrize("value", [-1, 0, 7_200_001, 2**31 - 1])
def test_a_length_that_no_configuration_allows_is_not_stored(
    hands: Hands, column: str, value: int
) -> None:  # J17
    with pytest.raises(CheckViolation):
        hands.connection.execute(hands.plain(f"update {{schema}}.supervisors set {column} = {value}"))
