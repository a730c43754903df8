"""The figures count the events of a run, and an empty run is reported as such."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.figures import figures
from tests.chaos.oracles import breaches
from tests.chaos.plan import Kind
from tests.chaos.report import verdict, words
from tests.chaos.sample_evidence import recovery, sample_run, with_faults


def test_the_figures_assign_losses_and_late_attempts_to_their_fault() -> None:
    counted = figures(sample_run(), [])
    line = counted.lines[Kind.FREEZE_TREE]
    assert (line.injected, line.recovered, line.refused) == (1, 1, 1)
    assert line.longest_s == 4.0
    assert (counted.sent, counted.in_doubt, counted.starts, counted.run_again) == (2, 0, 2, 1)
    assert counted.emptiness == ""


def test_the_figures_count_a_lost_task_under_its_fault() -> None:
    run = sample_run()
    run = replace(run, tasks=[replace(run.tasks[0], state="RUNNING"), run.tasks[1]])
    found = breaches(run)
    assert figures(run, found).lines[Kind.FREEZE_TREE].lost == 1
    held, last = verdict(run, figures(run, found), found)
    assert not held
    assert "FAILED: seed 1" in last


def test_a_run_that_proves_nothing_is_reported_as_empty() -> None:
    run = sample_run()
    for changed, why in (
        (with_faults(run), "no fault was injected"),
        (replace(run, recoveries=[recovery(was="CLAIMED")]), "no attempt was lost"),
        (replace(run, refusals=[]), "no late attempt was refused"),
    ):
        held, last = verdict(changed, figures(changed, []), [])
        assert not held
        assert last.startswith("EMPTY")
        assert why in last


def test_the_report_shows_every_kind_of_fault_and_the_skipped_ones() -> None:
    run = sample_run()
    run = replace(run, timeline=replace(run.timeline, skipped=("fill_disk: no room of its own",)))
    text = "\n".join(words(run, figures(run, []), []))
    assert "NOT INJECTED: fill_disk: no room of its own" in text
    assert "| freeze_tree | 1 | 1 | 0 | 0 | 1 | 4.00 s | 4.00 s |" in text
