"""Recoveries become incidents: one death, one process, one mass event. Their times, figures, sentences and reports."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from markdown_it import MarkdownIt

from everbeat.domain.charts import ChartMark, ChartPoint
from everbeat.domain.documents import plain_value
from everbeat.domain.inspection import SupervisorInfo
from everbeat.domain.past import PastSetting
from everbeat.domain.pulse.incident_report import incident_document, incident_markdown
from everbeat.domain.pulse.incidents import IncidentKind, incidents_of, rerun_of, totals_of
from everbeat.domain.pulse.sentences import (
    notice_of,
    outcome_of,
    pulse_says,
    recoveries_say,
    rescue_of,
    title_of,
)
from everbeat.domain.pulse.timeline import IncidentContext, timeline_of
from everbeat.domain.pulse.wording import names_of
from everbeat.domain.task.states import TaskState
from everbeat.errors.wording import brief_duration, on_one_line
from tests.domain.pulse.samples import NOW, ago, dead_tree, memory, recovery, tree, worker

TREES = {"fra-1-2-w": "fra-1", "fra-3-2-w": "fra-3"}


def departed(name: str, *, ended_s: float, how: str = "session") -> SupervisorInfo:
    return SupervisorInfo(
        supervisor_id=f"{name}-1-a", hostname=name, pid=1, started_at=ago(3_600), last_heartbeat_at=ago(ended_s + 5), beat_seq=7, is_stale=False,
        draining=False, session_held=True, ended_at=ago(ended_s), ended_how=how, workers=0, session_lost=False,
    )  # fmt: skip


def test_all_recoveries_of_one_supervisor_are_one_incident() -> None:
    (incident,) = incidents_of([recovery(1), recovery(2, worker_id="fra-2-3-w")])
    assert incident.kind is IncidentKind.TREE
    assert incident.id == "fra-2-1-a"
    assert incident.tasks == 2
    assert title_of(incident) == "fra-2 died"
    assert notice_of(incident) == "by session after 2.1 s"


def test_a_process_that_died_alone_has_its_own_incident() -> None:
    rows = [recovery(1, noticed_by="child_exit"), recovery(2, noticed_by="child_exit", worker_id="fra-2-9-w")]
    found = incidents_of(rows)
    assert {each.kind for each in found} == {IncidentKind.PROCESS}
    assert {each.id for each in found} == {"fra-2-2-w", "fra-2-9-w"}


@pytest.mark.parametrize(("apart_s", "kinds"), [(4, {IncidentKind.MASS}), (6, {IncidentKind.TREE})])
def test_trees_that_die_within_five_seconds_are_one_mass_event(
    apart_s: float, kinds: set[IncidentKind]
) -> None:
    other = recovery(
        2,
        worker_id="ams-1-2-w",
        supervisor_id="ams-1-1-a",
        hostname="ams-1",
        silent_s=46 - apart_s,
        noticed_s=43.9 - apart_s,
    )
    found = incidents_of([recovery(1), other])
    assert {each.kind for each in found} == kinds
    assert sum(each.tasks for each in found) == 2


def test_a_mass_event_is_recognised_by_its_words_even_if_the_deaths_are_paced() -> None:
    cause = "its database session ended: the whole tree is gone; many were lost together, and it did not come back within 60 s"
    other = recovery(
        2, worker_id="ams-1-2-w", supervisor_id="ams-1-1-a", hostname="ams-1", noticed_s=10, cause=cause
    )
    (incident,) = incidents_of([recovery(1, cause=cause), other])
    assert incident.kind is IncidentKind.MASS
    assert title_of(incident) == "2 hosts fell silent together"


def test_a_tree_that_held_nothing_is_an_incident_without_tasks_and_a_farewell_is_none() -> None:
    found = incidents_of([], [departed("fra-2", ended_s=44), departed("fra-4", ended_s=60, how="left")])
    assert [(each.id, each.tasks, outcome_of(each)) for each in found] == [
        ("fra-2-1-a", 0, "it held no task")
    ]


def test_a_tree_with_recoveries_is_not_listed_twice() -> None:
    (incident,) = incidents_of([recovery()], [departed("fra-2", ended_s=43.9)])
    assert (incident.kind, incident.tasks) == (IncidentKind.TREE, 1)


def test_the_times_of_a_rerun_come_from_the_certificate_and_never_run_backwards() -> None:
    data = {"detected_at": ago(44).isoformat(), "started_at": ago(300).isoformat(), "poison": False}
    found = rerun_of(recovery(certificate={"data": data}))
    moments = [found.started_at, found.silent_at, found.noticed_at, found.decided_at, found.again_at]
    assert moments == sorted(moment for moment in moments if moment is not None)
    assert found.noticed_at == ago(44)
    assert found.again_after_s == pytest.approx(2.8)


def test_a_certificate_with_nonsense_does_not_break_an_incident() -> None:
    (incident,) = incidents_of([recovery(certificate={"data": {"detected_at": "nonsense", "started_at": 7}})])
    assert incident.noticed_at == ago(43.9)


def test_totals_show_the_median_with_the_slowest() -> None:
    rows = [
        recovery(number, supervisor_id=f"s{number}", worker_id=f"w-{number}-w", silent_s=43.9 + after)
        for number, after in enumerate((1, 2, 31), 1)
    ]
    totals = totals_of(incidents_of(rows))
    assert (totals.recovered, totals.noticed_s, totals.slowest_notice_s, totals.slowest_notice_by) == (
        3,
        2.0,
        31.0,
        "session",
    )
    assert totals.again_s == pytest.approx(2.6)
    assert totals.slowest_again_s == pytest.approx(31.6)


def test_no_recovery_leaves_the_medians_unknown() -> None:
    totals = totals_of([])
    assert (totals.recovered, totals.noticed_s, totals.again_s) == (0, None, None)
    assert (
        recoveries_say(totals, overdue=0).lead
        == "No worker died in the last 24 hours, and nothing is overdue"
    )


def test_a_task_that_waits_keeps_the_page_from_saying_that_all_is_well() -> None:
    waits = recovery(2, ran_again_at=None, ran_again_on=None, became=TaskState.PENDING)
    incidents = incidents_of([recovery(1), waits])
    assert (
        recoveries_say(totals_of(incidents), overdue=0).lead
        == "1 task of the dead waits to run again; nothing is overdue"
    )
    assert outcome_of(incidents[0]) == "1 waiting"


def test_incidents_whose_older_recoveries_were_not_read_say_so() -> None:
    old = recovery(1, supervisor_id="old-1-a", worker_id="old-1-2-w", silent_s=7_202, noticed_s=7_200)
    new = [recovery(number) for number in (2, 3)]
    assert not totals_of(incidents_of([old, *new], most=4)).is_cut
    latest, cut = incidents_of([old, *new], most=3)
    assert (latest.is_cut, cut.is_cut) == (False, True)
    said = recoveries_say(totals_of([latest, cut]), overdue=0).lead
    assert said == "Each of the latest 3 tasks of the dead runs again or has ended; nothing is overdue"
    assert incident_document(cut, TREES)["is_complete"] is False
    assert "Only the latest recoveries were read" in incident_markdown(cut, TREES, made_at=NOW)
    assert "Only the latest" not in incident_markdown(latest, TREES, made_at=NOW)


def test_rescuers_are_named_by_their_trees() -> None:
    (incident,) = incidents_of([recovery(1), recovery(2), recovery(3, ran_again_on="fra-3-2-w")])
    assert rescue_of(incident, TREES) == "fra-1 took 2, fra-3 took 1"


def test_the_report_of_an_incident_has_every_task_and_cannot_be_broken_by_names() -> None:
    hostile = recovery(2, name="a | b\n# <script>", cause="x | y")
    (incident,) = incidents_of([recovery(1), hostile])
    text = incident_markdown(incident, TREES, made_at=NOW)
    rows = [line for line in text.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert len(rows) == 2
    assert all(row.replace("\\|", "").count("|") + 1 == 12 for row in rows)
    assert "<script>" not in text
    document = json.loads(msgspec.json.encode(incident_document(incident, TREES), enc_hook=plain_value))
    assert [each["recovery"] for each in document["tasks"]] == [1, 2]
    assert document["rescuers"] == {"fra-1": 2}


def test_the_report_of_an_incident_has_its_course_and_the_numbers_around_it() -> None:
    (incident,) = incidents_of([recovery(1), recovery(2, ran_again_on="fra-3-2-w", ran_again_at=ago(40))])
    course = timeline_of(incident, TREES)
    assert [each.at for each in course] == sorted(each.at for each in course)
    told = [each.words for each in course]
    assert told.index("last sign of life") < told.index("fra-2 died: noticed by session after 2.1 s")
    assert any(words.startswith("fra-3 begins to run 1 task again") for words in told)
    context = IncidentContext(
        points=[
            ChartPoint(at=ago(60), completed=7, failed=2, due=5, oldest_due_s=3.0),
            ChartPoint(at=ago(0)),
        ],
        marks=[ChartMark(at=ago(50), kind="pause", words="paused: queue | mail")],
        settings=[PastSetting(ago(90), "pause", "queue mail", "ann", None)],
    )
    text = incident_markdown(incident, TREES, made_at=NOW, context=context)
    assert "| 9 | 2 |  |  | 5 | 3.0 s |  |  |" in text
    assert "paused: queue \\| mail" in text
    assert "queue mail (pause by ann)" in text
    assert "Late writes" in text
    assert "## The installation around it" not in incident_markdown(incident, TREES, made_at=NOW)
    document = json.loads(
        msgspec.json.encode(incident_document(incident, TREES, context), enc_hook=plain_value)
    )
    assert [each["what"] for each in document["timeline"]] == told
    assert document["around"]["points"][0]["due"] == 5


def say(
    *trees: object, incidents: list[object] | None = None, overdue: int = 0, running: int = 0
) -> tuple[str, str]:
    found = memory(*trees, workers=(worker(running=running),))  # type: ignore[arg-type]
    names = names_of(trace.tree for trace in found.traces)
    said = pulse_says(found.traces, incidents or [], names=names, overdue=overdue, overdue_ms=5_000, at=NOW)  # type: ignore[arg-type]
    return said.tone, said.lead


def test_the_pulse_opens_with_the_worst_news() -> None:
    dead = incidents_of([recovery()])
    assert say(tree(), tree("fra-3")) == ("live", "All 2 trees beat, and no work is stuck with the dead.")
    assert say() == ("late", "No worker tree is running, so no task runs.")
    assert say(tree(), dead_tree(), incidents=[*dead]) == (
        "run",
        "fra-2 died 46 s ago; its task ran again within 2.7 s.",
    )
    late = say(tree(beat_s=23), dead_tree(), incidents=[*dead], running=12)
    assert late == (
        "late",
        "fra-1 has been silent for 23 s. Unless it beats, its 12 tasks are recovered in 7.0 s.",
    )
    tone, lead = say(tree(beat_s=23), overdue=2)
    assert (tone, lead) == (
        "dead",
        "2 leases of dead or silent workers should have been recovered 5.0 s ago.",
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.018, "18 ms"), (0.0994, "99 ms"), (0.4, "0.4 s"), (2.14, "2.1 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.7, "1 m"),
        (68, "1 m 8 s"), (7_500, "2 h 5 m"),
    ],
)  # fmt: skip
def test_durations_are_brief(seconds: float, text: str) -> None:
    assert brief_duration(seconds) == text


def test_trees_on_one_host_have_different_names() -> None:
    trees = [tree("a", pid=1), tree("a", pid=2, id="other"), tree("b", slot="gpu")]
    assert list(names_of(trees).values()) == ["a 1", "a 2", "gpu"]


@pytest.mark.parametrize(
    "name",
    [
        "&lt;b&gt; &amp; &#124;",
        "~~struck~~ **bold** __x__",
        "![x](https://evil.example/x.png) [y](javascript:alert(1))",
        "https://evil.example/?a=1 www.evil.example http://a",
        "\u202egpj.exe \x1b[31mred\x1b[0m | # > - 1.",
        "\\| \\\\| `code` ``",
    ],
)
def test_a_name_is_only_a_text_in_the_report_of_an_incident(name: str) -> None:
    (incident,) = incidents_of([recovery(1, name=name, cause=name)])
    text = incident_markdown(incident, TREES, made_at=NOW)
    parser = MarkdownIt().enable(["table", "strikethrough"])
    inline = [each for token in parser.parse(text) for each in token.children or ()]
    kinds = {each.type for each in inline}
    assert kinds <= {"text", "text_special", "softbreak"}, kinds
    cells = ["".join(each.content for each in token.children or ()) for token in parser.parse(text)]
    assert cells.count(on_one_line(name)) == 2, "as the name of the task, and as the cause"
    assert not re.search(r"://|www\.|[\u202e\x1b]", text), "GitHub makes links of such texts"
