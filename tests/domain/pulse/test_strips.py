"""The meaning of a strip: beats, bumps, missing beats, death, exit, and take-overs; and the same in words."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from everbeat.domain.pulse.incidents import incidents_of
from everbeat.domain.pulse.judging import TreeState, judged_trees, observed_rules
from everbeat.domain.pulse.memory import PulseMemory, TreeTrace
from everbeat.domain.pulse.sample import PulseSample, StoredBeat
from everbeat.domain.pulse.strips import Strip, strip_of, takeovers_of
from tests.domain.pulse.samples import NOW, RULES, ago, dead_tree, memory, recovery, tree, worker


def strip(trace: TreeTrace, name: str = "fra-1") -> Strip:
    return strip_of(trace, name=name, at=NOW)


def only(found: PulseMemory) -> TreeTrace:
    (trace,) = found.traces
    return trace


def test_a_beating_tree_has_a_spike_for_each_beat_with_its_load() -> None:
    found = memory(tree(), workers=(worker(running=2, slots=8),))
    found.backfill([StoredBeat("fra-1-1-a", 5, ago(23), 8), StoredBeat("fra-1-1-a", 6, ago(13), 4)])
    drawn = strip(only(found))
    assert [(spike.ago_s, spike.load) for spike in drawn.spikes] == [(23, 1.0), (13, 0.5), (3, 0.25)]
    assert drawn.state is TreeState.BEATS
    assert (drawn.missed, drawn.flat_from_s, drawn.decides_s, drawn.late_from_s) == ((), None, None, None)
    assert drawn.says == "fra-1 beats every 10 s"


def test_each_second_with_a_held_session_is_a_bump_even_between_beats() -> None:
    found = PulseMemory(RULES)
    for second in (2, 1, 0):
        found.record(PulseSample(at=ago(second), is_standby=False, trees=(tree(),), workers=()))
    assert strip(only(found)).bumps == (2, 1, 0)


def test_a_lost_session_makes_no_bump_and_makes_the_tree_a_suspect() -> None:
    drawn = strip(only(memory(tree(locked=False, sessions=0))))
    assert drawn.bumps == ()
    assert drawn.state is TreeState.SUSPECT
    assert drawn.says == "fra-1 might be dead: its session is lost"


def test_a_tree_behind_a_pooler_has_no_bumps_and_says_so() -> None:
    drawn = strip(only(memory(tree(session_held=False, held_here=False, locked=False, sessions=2))))
    assert drawn.is_pooled
    assert drawn.state is TreeState.BEATS
    assert "no session to watch" in drawn.says


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [(19.9, TreeState.BEATS), (20.0, TreeState.LATE), (29.9, TreeState.LATE), (30.0, TreeState.SUSPECT)],
)
def test_a_tree_is_late_from_the_second_missing_beat_until_age_decides(
    silent_s: float, state: TreeState
) -> None:
    assert strip(only(memory(tree(beat_s=silent_s)))).state is state


def test_a_late_strip_shows_missing_beats_amber_and_the_moment_of_decision() -> None:
    drawn = strip(only(memory(tree(beat_s=23), workers=(worker(running=12),))))
    assert drawn.missed == (13, 3)
    assert drawn.late_from_s == 3
    assert drawn.decides_s == -7
    assert drawn.says == "fra-1 has not beaten for 23 s; age decides in 7.0 s"


def test_a_worker_that_beats_for_itself_keeps_its_tree_from_being_late() -> None:
    found = memory(tree(beat_s=25), workers=(worker(last_beat_at=ago(4), beat_seq=1),))
    assert strip(only(found)).state is TreeState.BEATS


def test_a_dead_strip_is_flat_from_the_last_sign_of_life_and_says_how_it_was_noticed() -> None:
    (incident,) = incidents_of([recovery()])
    trace = only(memory(dead_tree()))
    drawn = strip_of(trace, name="fra-2", at=NOW, incident=incident)
    assert drawn.state is TreeState.DEAD
    assert drawn.flat_from_s == pytest.approx(46)
    assert drawn.notice is not None
    assert (drawn.notice.by, drawn.notice.after_s) == ("session", 2.1)
    assert drawn.says == "fra-2 is dead; flat for 46 s; noticed by session after 2.1 s"


def test_a_death_whose_session_left_no_record_says_no_time_until_it_was_noticed() -> None:
    trace = only(memory(dead_tree()))
    drawn = strip_of(trace, name="fra-2", at=NOW, incident=None)
    assert drawn.says.endswith("; noticed by session")
    by_age = strip_of(only(memory(dead_tree(how="age"))), name="fra-2", at=NOW, incident=None)
    assert "; noticed by age after " in by_age.says


def test_the_last_sign_of_life_of_a_dead_tree_can_be_its_session() -> None:
    found = PulseMemory(RULES)
    found.record(PulseSample(at=ago(45), is_standby=False, trees=(tree("fra-2", beat_s=50),), workers=()))
    found.record(PulseSample(at=NOW, is_standby=False, trees=(dead_tree(),), workers=()))
    assert strip(only(found)).flat_from_s == 45


def test_a_standby_judges_no_tree_by_the_age_of_its_beats() -> None:
    for silent_s, state in ((5, TreeState.BEATS), (400, TreeState.UNKNOWN)):
        silent = tree("fra-2", beat_s=silent_s, locked=False, sessions=0, held_here=False)
        sample = PulseSample(at=NOW, is_standby=True, trees=(silent,), workers=())
        (judgement,) = judged_trees(sample, RULES).values()
        assert (judgement.state, judgement.decides_in_s is None) == (state, state is TreeState.UNKNOWN)


def test_an_orderly_exit_is_not_a_death() -> None:
    drawn = strip(only(memory(dead_tree(how="left"))))
    assert drawn.state is TreeState.LEFT
    assert (drawn.left_s, drawn.flat_from_s, drawn.notice) == (44, None, None)


def test_a_process_that_died_alone_is_named_with_its_cause_but_its_tree_beats() -> None:
    gone = worker(number=3, ended_at=ago(10), ended_how="child_exit", ended_cause="killed by SIGKILL")
    drawn = strip(only(memory(tree(), workers=(worker(), gone))))
    assert [line.death for line in drawn.processes] == [None, "killed by SIGKILL"]
    assert drawn.state is TreeState.BEATS
    assert "1 worker process died" in drawn.says


def test_work_that_was_taken_over_is_marked_on_the_tree_that_took_it() -> None:
    found = memory(tree(), dead_tree(), workers=(worker(),))
    incidents = incidents_of([recovery(1), recovery(2), recovery(3, ran_again_on=None, ran_again_at=None)])
    (takeover,) = takeovers_of(incidents, found.traces, at=NOW)["fra-1-1-a"]
    assert (takeover.count, takeover.dead) == (2, "fra-2")
    assert takeover.ago_s == pytest.approx(43.3)
    trace = next(each for each in found.traces if each.tree.id == "fra-1-1-a")
    assert "took over 2 tasks of fra-2" in strip_of(trace, name="fra-1", at=NOW, takeovers=[takeover]).says


def test_the_memory_keeps_ninety_seconds_and_forgets_trees_that_left() -> None:
    found = PulseMemory(RULES)
    for second in range(300):
        at = NOW + timedelta(seconds=second)
        found.record(
            PulseSample(
                at=at,
                is_standby=False,
                trees=(tree(beat_seq=second, last_beat_at=at), dead_tree(how="left")),
                workers=(),
            )
        )
    (trace,) = found.traces
    assert trace.tree.hostname == "fra-1"
    assert len(trace.beats) == len(trace.seen) == 91


def test_the_order_of_trees_does_not_change_when_one_dies() -> None:
    alive = [trace.tree.hostname for trace in memory(tree("b"), tree("a"), tree("c")).traces]
    dead = [trace.tree.hostname for trace in memory(tree("b"), dead_tree("a"), tree("c")).traces]
    assert alive == dead == ["a", "b", "c"]


def test_the_shortest_threshold_of_the_other_trees_decides_but_never_before_the_trees_own() -> None:
    patient = tree("b", beat_s=25, claimed_stale_ms=60_000, running_stale_ms=60_000)
    found = {
        trace.tree.hostname: trace.judgement.decides_in_s
        for trace in memory(tree("a", beat_s=25), patient).traces
    }
    assert found == {"a": 35, "b": 35}


thresholds = some.none() | some.integers(0, 4)


@given(
    some.lists(some.tuples(some.booleans(), thresholds, thresholds), max_size=5),
    some.tuples(thresholds, thresholds),
)
def test_each_tree_is_judged_by_the_shortest_threshold_of_all_others(
    registered: list[tuple[bool, int | None, int | None]], usual: tuple[int | None, int | None]
) -> None:
    trees = [
        tree(str(number), ended_at=None if lives else NOW, claimed_stale_ms=claimed, running_stale_ms=running)
        for number, (lives, claimed, running) in enumerate(registered)
    ]
    found = observed_rules(trees, replace(RULES, claimed_ms=usual[0], running_ms=usual[1]))
    for each in trees:
        others = [other for other in trees if other.ended_at is None and other is not each] or [each]
        for usual_ms, of_others, shortest in (
            (usual[0], [other.claimed_stale_ms for other in others], found[each.id].claimed_ms),
            (usual[1], [other.running_stale_ms for other in others], found[each.id].running_ms),
        ):
            known = [ms for ms in of_others if ms is not None]
            assert shortest == (None if usual_ms is None else min(known, default=usual_ms))
