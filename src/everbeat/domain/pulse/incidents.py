"""Groups recoveries into incidents: the death of one supervisor or of one process, one mass event, or one stall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from statistics import median
from typing import Any, Final

from msgspec import Struct, structs

from everbeat.domain.inspection import RecoveryInfo, SupervisorInfo
from everbeat.domain.pulse.wording import host_of
from everbeat.domain.recovery.liveness import FAREWELL
from everbeat.domain.task.states import TaskState

TOGETHER: Final = timedelta(seconds=5)
"""Trees that die within this time of each other died of the same cause, such as the network."""
_CUT_WITHIN: Final = timedelta(minutes=1)
"""How long the recoveries of one death take at most. An incident that began later than that after the oldest recovery read is complete."""
_OF_TREES: Final = frozenset({"session", "age", "startup", "sweep"})
OF_MASS: Final = "many were lost together"


class IncidentKind(StrEnum):
    """The kind of an incident."""

    TREE = "tree"
    """A supervisor died with all its workers."""
    PROCESS = "process"
    """One worker process died, and its supervisor noticed."""
    MASS = "mass"
    """Several trees died together."""
    STALL = "stall"
    """The code of a task reported no progress for too long."""
    RELEASE = "release"
    """An operator released the tasks of a worker."""


class RecoveryCourse(Struct, frozen=True, kw_only=True):
    """The course of one task in an incident: one row of its Gantt chart. Times that are unknown are None.

    The code ran from `started_at` until the last sign of life at `silent_at`. Its death was noticed at `noticed_at`, and the recovery was
    committed at `decided_at`. The task ran again from `again_at` until `ended_at`.
    """

    recovery: RecoveryInfo
    silent_at: datetime
    noticed_at: datetime
    decided_at: datetime
    started_at: datetime | None = None
    again_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def again_after_s(self) -> float | None:
        """Return how many seconds passed from the last sign of life until the task ran again."""
        return None if self.again_at is None else (self.again_at - self.silent_at).total_seconds()


class Incident(Struct, frozen=True, kw_only=True):
    """One incident. `names` and `hosts` are those of its trees, `parties` the ids of its supervisors and workers.

    `at` is the first last sign of life, `noticed_at` when the death was noticed first, and `noticed_after_ms` how long that took, at worst.
    `is_cut`: it can have older recoveries that were not read.
    """

    id: str
    kind: IncidentKind
    at: datetime
    noticed_at: datetime
    noticed_by: str
    noticed_after_ms: int | None
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    parties: tuple[str, ...]
    cause: str
    reruns: tuple[RecoveryCourse, ...] = ()
    is_cut: bool = False

    @property
    def happened_at(self) -> datetime:
        """Return the moment at which a reader looks for the incident: that of a release, or the last sign of life of the dead."""
        return self.noticed_at if self.kind is IncidentKind.RELEASE else self.at

    @property
    def beat_at(self) -> datetime | None:
        """Return the earliest moment from which the age of a lease counted: the last heartbeat of its tree, or a later claim or start."""
        beats = (each.recovery.last_beat_at for each in self.reruns if each.recovery.last_beat_at is not None)
        return min(beats, default=None)

    @property
    def tasks(self) -> int:
        """Return the number of tasks that were recovered."""
        return len(self.reruns)

    @property
    def waiting(self) -> int:
        """Return how many tasks neither run again nor have ended, but are going to."""
        return sum(_is_waiting(rerun.recovery) for rerun in self.reruns)

    @property
    def poison(self) -> int:
        """Return how many of the tasks are not run again, because they killed too many processes."""
        return sum(is_poison(rerun.recovery) for rerun in self.reruns)

    def rescuers(self, names: Mapping[str, str]) -> dict[str, int]:
        """Return how many tasks ran again on each tree, the most first. `names` are the trees of workers; otherwise, it is the host."""
        on = Counter(
            names.get(worker, host_of(worker))
            for rerun in self.reruns
            if (worker := rerun.recovery.ran_again_on) is not None
        )
        return dict(on.most_common())

    @property
    def again_after_s(self) -> list[float]:
        """Return after how many seconds the tasks ran again, sorted."""
        return sorted(each.again_after_s for each in self.reruns if each.again_after_s is not None)


class Totals(Struct, frozen=True, kw_only=True):
    """The figures of several incidents. Durations are in seconds, and None if nothing was measured. `is_cut`: older recoveries were not read."""

    recovered: int
    incidents: int
    poison: int
    waiting: int
    noticed_s: float | None = None
    slowest_notice_s: float | None = None
    slowest_notice_by: str | None = None
    again_s: float | None = None
    slowest_again_s: float | None = None
    is_cut: bool = False


def rerun_of(recovery: RecoveryInfo) -> RecoveryCourse:
    """Return what happened to the task of one recovery, from its row and its death certificate."""
    detected_at = _moment(_certified(recovery, "detected_at"))
    noticed_at = min(detected_at or recovery.noticed_at, recovery.noticed_at)
    if recovery.noticed_after_ms is not None:
        silent_at = noticed_at - timedelta(milliseconds=recovery.noticed_after_ms)
    else:
        silent_at = min(recovery.last_beat_at or noticed_at, noticed_at)
    return RecoveryCourse(
        recovery=recovery,
        started_at=_moment(_certified(recovery, "started_at")) if recovery.was is TaskState.RUNNING else None,
        silent_at=silent_at,
        noticed_at=noticed_at,
        decided_at=recovery.noticed_at,
        again_at=recovery.ran_again_at,
        ended_at=recovery.became_at,
    )


def incidents_of(
    recoveries: Iterable[RecoveryInfo],
    departed: Iterable[SupervisorInfo] = (),
    *,
    names: Mapping[str, str] | None = None,
    most: int | None = None,
) -> list[Incident]:
    """Group recoveries, and the deaths of `departed` trees that held nothing, into incidents. The latest comes first.

    `names` are the names of trees by supervisor id. Other trees are named by their host. `most` is how many recoveries were read at most.
    If there are as many, older ones can be missing. The incidents that these can belong to are cut.
    """
    named = names or {}
    read = list(recoveries)
    groups: dict[tuple[IncidentKind, str], list[RecoveryInfo]] = {}
    for recovery in read:
        groups.setdefault(_key(recovery), []).append(recovery)
    found = [_incident(kind, party, group, named) for (kind, party), group in groups.items()]
    known = {party for each in found for party in each.parties}
    found += [_empty(tree, named) for tree in departed if _died(tree) and tree.supervisor_id not in known]
    whole = sorted(_merged(found), key=lambda each: (each.noticed_at, each.id), reverse=True)
    if most is None or len(read) < most:
        return whole
    reaches = min(each.noticed_at for each in read) + _CUT_WITHIN
    return [structs.replace(each, is_cut=each.reruns != () and each.noticed_at <= reaches) for each in whole]


def totals_of(incidents: Sequence[Incident]) -> Totals:
    """Return the figures of these incidents."""
    reruns = [rerun for incident in incidents for rerun in incident.reruns]
    noticed = [
        (rerun.recovery.noticed_after_ms / 1_000, rerun.recovery.noticed_by)
        for rerun in reruns
        if rerun.recovery.noticed_after_ms is not None
        and rerun.recovery.noticed_by not in ("operator", "progress")
    ]
    again = [after for incident in incidents for after in incident.again_after_s]
    slowest = max(noticed, default=None)
    return Totals(
        recovered=len(reruns),
        incidents=len(incidents),
        poison=sum(incident.poison for incident in incidents),
        waiting=sum(incident.waiting for incident in incidents),
        noticed_s=median(after for after, _ in noticed) if noticed else None,
        slowest_notice_s=None if slowest is None else slowest[0],
        slowest_notice_by=None if slowest is None else slowest[1],
        again_s=median(again) if again else None,
        slowest_again_s=max(again, default=None),
        is_cut=any(incident.is_cut for incident in incidents),
    )


def is_poison(recovery: RecoveryInfo) -> bool:
    """Return whether the task does not run again because it killed too many processes."""
    return bool(_certified(recovery, "poison"))


def certificate_of(recovery: RecoveryInfo) -> dict[str, Any]:
    """Return the fields of the death certificate, which is stored as the error of the attempt. It is empty if nothing is stored."""
    data = None if recovery.certificate is None else recovery.certificate.get("data")
    return dict(data) if isinstance(data, dict) else {}


def _certified(recovery: RecoveryInfo, name: str) -> object:
    return certificate_of(recovery).get(name)


def _moment(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _is_waiting(recovery: RecoveryInfo) -> bool:
    goes_on = recovery.action in ("requeue", "retry", "reschedule")
    return (
        goes_on
        and recovery.ran_again_at is None
        and recovery.became in (TaskState.PENDING, TaskState.CLAIMED)
    )


def _key(recovery: RecoveryInfo) -> tuple[IncidentKind, str]:
    match recovery.noticed_by:
        case "progress":
            return IncidentKind.STALL, f"stall-{recovery.id}"
        case "operator":
            return IncidentKind.RELEASE, f"{recovery.worker_id}-{recovery.noticed_at:%Y%m%d%H%M}"
        case way if way in _OF_TREES and recovery.supervisor_id is not None:
            return IncidentKind.TREE, recovery.supervisor_id
        case _:
            return IncidentKind.PROCESS, recovery.worker_id


def _incident(
    kind: IncidentKind, party: str, group: Sequence[RecoveryInfo], named: Mapping[str, str]
) -> Incident:
    reruns = sorted((rerun_of(each) for each in group), key=lambda rerun: rerun.recovery.id)
    first = min(reruns, key=lambda rerun: rerun.noticed_at)
    after = [each.noticed_after_ms for each in group if each.noticed_after_ms is not None]
    names = [
        named.get(each.supervisor_id or "") or each.hostname or host_of(each.worker_id) for each in group
    ]
    return Incident(
        id=party,
        kind=kind,
        at=min(rerun.silent_at for rerun in reruns),
        noticed_at=first.noticed_at,
        noticed_by=first.recovery.noticed_by,
        noticed_after_ms=max(after, default=None),
        names=tuple(dict.fromkeys(names)),
        hosts=tuple(dict.fromkeys(each.hostname or host_of(each.worker_id) for each in group)),
        parties=tuple(dict.fromkeys([*_supervisor(kind, party), *(each.worker_id for each in group)])),
        cause=first.recovery.cause,
        reruns=tuple(reruns),
    )


def _supervisor(kind: IncidentKind, party: str) -> tuple[str, ...]:
    """Return the supervisor that died. The other kinds concern workers; the id of a release or a stall is not that of a worker."""
    return (party,) if kind is IncidentKind.TREE else ()


def _died(tree: SupervisorInfo) -> bool:
    return tree.ended_at is not None and tree.ended_how != FAREWELL


def _empty(tree: SupervisorInfo, named: Mapping[str, str]) -> Incident:
    ended_at = tree.ended_at or tree.last_heartbeat_at
    silent_at = min(tree.last_heartbeat_at, ended_at)
    by = tree.ended_how or "unknown"
    return Incident(
        id=tree.supervisor_id,
        kind=IncidentKind.TREE,
        at=silent_at,
        noticed_at=ended_at,
        noticed_by=by,
        # The session's end is not recorded if nothing was recovered, so the notice cannot be measured.
        noticed_after_ms=round((ended_at - silent_at).total_seconds() * 1_000) if by == "age" else None,
        names=(named.get(tree.supervisor_id, tree.hostname),),
        hosts=(tree.hostname,),
        parties=(tree.supervisor_id,),
        cause="it held no task",
    )


def _merged(found: Iterable[Incident]) -> list[Incident]:
    """Join trees that were lost together: within five seconds of the one before, or by the words of their certificates."""
    trees = sorted(
        (each for each in found if each.kind is IncidentKind.TREE),
        key=lambda each: (each.noticed_at, each.id),
    )
    chains: list[list[Incident]] = []
    for tree in trees:
        last = chains[-1][-1] if chains else None
        is_with = last is not None and (
            tree.noticed_at - last.noticed_at <= TOGETHER or (OF_MASS in tree.cause and OF_MASS in last.cause)
        )
        if is_with:
            chains[-1].append(tree)
        else:
            chains.append([tree])
    others = [each for each in found if each.kind is not IncidentKind.TREE]
    return others + [chain[0] if len(chain) == 1 else _mass(chain) for chain in chains]


def _mass(trees: Sequence[Incident]) -> Incident:
    after = [tree.noticed_after_ms for tree in trees if tree.noticed_after_ms is not None]
    return Incident(
        id=trees[0].id,
        kind=IncidentKind.MASS,
        at=min(tree.at for tree in trees),
        noticed_at=trees[0].noticed_at,
        noticed_by=trees[0].noticed_by,
        noticed_after_ms=max(after, default=None),
        names=tuple(dict.fromkeys(name for tree in trees for name in tree.names)),
        hosts=tuple(dict.fromkeys(host for tree in trees for host in tree.hosts)),
        parties=tuple(party for tree in trees for party in tree.parties),
        cause=trees[0].cause,
        reruns=tuple(rerun for tree in trees for rerun in tree.reruns),
    )
