"""The title of an incident, the ids that belong to it, and the moment that a reader sees."""

import pytest

from everbeat.domain.inspection import SupervisorInfo
from everbeat.domain.pulse.incident_report import incident_document, incident_markdown
from everbeat.domain.pulse.incidents import IncidentKind, incidents_of
from everbeat.domain.pulse.sentences import pulse_says, title_of
from everbeat.domain.pulse.timeline import timeline_of
from everbeat.domain.pulse.wording import names_in_incidents
from tests.domain.pulse.samples import NOW, ago, recovery


def lived(
    pid: int,
    *,
    host: str = "fra-2",
    since_s: float = 3_600,
    silent_s: float = 1,
    ended_s: float | None = None,
    slot: str | None = None,
) -> SupervisorInfo:
    return SupervisorInfo(
        supervisor_id=f"{host}-{pid}-a", hostname=host, pid=pid, started_at=ago(since_s), last_heartbeat_at=ago(silent_s), beat_seq=7, is_stale=False,
        draining=False, session_held=ended_s is None, ended_at=None if ended_s is None else ago(ended_s),
        ended_how=None if ended_s is None else "session", workers=1, session_lost=False, slot=slot,
    )  # fmt: skip


DEAD = lived(1, silent_s=50, ended_s=43.9)


@pytest.mark.parametrize(
    ("others", "title"),
    [
        ([], "fra-2 died"),
        ([lived(9)], "fra-2 1 died"),
        ([lived(9, since_s=9_000)], "fra-2 1 died"),
        ([lived(9, since_s=100)], "fra-2 1 died"),
        ([lived(9, since_s=40)], "fra-2 died"),
        ([lived(9, silent_s=4_000, ended_s=3_900, since_s=9_000)], "fra-2 died"),
        ([lived(9, host="fra-3")], "fra-2 died"),
        ([lived(9, slot="fra-2-b")], "fra-2 died"),
    ],
    ids=[
        "alone",
        "beside-another",
        "beside-an-older-one",
        "beside-a-younger-one",
        "before-its-successor",
        "after-its-predecessor",
        "other-host",
        "other-slot",
    ],
)
def test_the_pid_distinguishes_a_dead_tree_from_one_that_lived_on_its_host_at_the_same_time(
    others: list[SupervisorInfo], title: str
) -> None:
    (incident,) = incidents_of([recovery()], [DEAD], names=names_in_incidents([DEAD, *others]))
    assert title_of(incident) == title


def test_trees_of_one_host_that_died_together_are_not_several_hosts() -> None:
    other = recovery(2, worker_id="fra-2-9-w", supervisor_id="fra-2-9-a")
    names = names_in_incidents([DEAD, lived(9, silent_s=50, ended_s=43.9)])
    (incident,) = incidents_of([recovery(1), other], names=names)
    assert (incident.kind, title_of(incident)) == (IncidentKind.MASS, "Trees of fra-2 died together")
    assert incident_document(incident, {})["hosts"] == ("fra-2",)


@pytest.mark.parametrize("noticed_by", ["operator", "progress", "child_exit"])
def test_the_parties_of_an_incident_are_ids_that_exist(noticed_by: str) -> None:
    (incident,) = incidents_of([recovery(noticed_by=noticed_by)])
    assert incident.parties == ("fra-2-2-w",)


def test_a_worker_was_released_when_the_operator_released_it_and_not_when_it_was_last_heard_of() -> None:
    released = recovery(noticed_by="operator", silent_s=600, noticed_s=30)
    (incident,) = incidents_of([released])
    assert (incident.at, incident.happened_at) == (ago(600), ago(30))
    said = pulse_says([], [incident], names={}, overdue=0, overdue_ms=None, at=NOW)
    assert said.lead.startswith("A worker of fra-2 was released 30 s ago")
    (death,) = incidents_of([recovery()])
    assert death.happened_at == death.at == ago(46)


def test_the_heartbeat_of_an_incident_is_not_the_start_of_one_of_its_later_attempts() -> None:
    (incident,) = incidents_of([recovery(2, last_beat_at=ago(47)), recovery(1, last_beat_at=ago(75))])
    assert incident.beat_at == ago(75)
    assert [each.at for each in timeline_of(incident, {}) if "heartbeat" in each.words] == [ago(75)]
    assert "The last heartbeat" not in incident_markdown(incident, {}, made_at=NOW)
