"""What an examination thinks of everbeat's own work: beats, recovery, tasks nobody takes, what is held back, what is kept too long.

What lives here: the judgements and their limits. What may not: reading the facts, and judging the server (`server_checks`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.diagnosis import (
    BadRow,
    Check,
    CheckCode,
    Crew,
    Gaps,
    Oldest,
    SilentTrees,
    Suspects,
    Unresponsive,
    Unserved,
    Unswept,
    Verdict,
)
from everbeat.domain.explanation import SilenceRules, counted
from everbeat.domain.pauses import Pause
from everbeat.domain.silence import UNRESPONSIVE_S, is_mass
from everbeat.errors.wording import some

_LATE_HOURS: Final = 3.0
LOOKS_MISSED: Final = 2
"""A lease that is overdue by so many looks of a sweeper was not seen by any."""


def judge_crew(crew: Crew) -> Check:
    """Whether anybody works."""
    if crew.workers:
        text = f"{counted(crew.workers, 'live worker')} of {counted(crew.supervisors, 'live supervisor')}"
        if not crew.quiet:
            return Check(CheckCode.WORKERS, Verdict.OK, text)
        quiet = f"quiet, by an operator: {some(list(crew.quiet))}"
        resume = "when the reason is gone: everbeat workers quiet --resume --all."
        if crew.has_work and len(crew.quiet) >= crew.supervisors:
            return Check(
                CheckCode.WORKERS, Verdict.WARN, f"{text}, all of them {quiet}; tasks are open", resume
            )
        return Check(CheckCode.WORKERS, Verdict.OK, f"{text}; {quiet}", resume)
    since = (
        "; none was ever registered"
        if crew.last_beat_at is None
        else f"; the last beat came at {crew.last_beat_at.isoformat(timespec='seconds')}"
    )
    fix = "start one: everbeat worker MODULE:APP."
    lost = f" ({counted(crew.lost, 'tree')} without a session in PostgreSQL)" if crew.lost else ""
    if crew.has_work:
        return Check(CheckCode.WORKERS, Verdict.FAIL, f"no live worker{lost}, and tasks wait{since}", fix)
    return Check(CheckCode.WORKERS, Verdict.WARN, f"no live worker{lost}{since}", fix)


def judge_unresponsive(found: Sequence[Unresponsive]) -> Check:
    """Whether processes of live workers do not respond to their supervisors."""
    if not found:
        text = f"the process of every live worker has responded within {UNRESPONSIVE_S:g} s"
        return Check(CheckCode.UNRESPONSIVE, Verdict.OK, text)
    named = [
        f"{each.worker_id} (pid {each.pid} on {each.hostname}) for {each.lag_s:.0f} s at its last snapshot, {each.snapshot_s:.0f} s ago,"
        f" with {counted(each.held, 'task')}"
        for each in found
    ]
    text = (
        f"worker processes that did not respond, because they are stopped or code blocks them: {some(named)}"
    )
    fix = (
        f"look at the process, or release what it holds: everbeat workers release {found[0].worker_id}. To have such processes"
        " replaced, set RecoveryConfig(hang_timeout_ms=...)."
    )
    return Check(CheckCode.UNRESPONSIVE, Verdict.WARN, text, fix)


def judge_trees(found: SilentTrees, *, command: str, is_watched: bool) -> Check:
    """Whether trees have lost their sessions, or so many are silent that their recovery waits.

    `command` recovers what the silent ones hold at once. `is_watched`: those without a session were so for the whole session grace.
    """
    text = f"{found.silent} of {counted(found.known, 'tree')} silent for two heartbeat intervals or more"
    is_silent = is_mass(silent=found.silent, known=found.known)
    if found.lost:
        return _judge_lost(found, command=command if is_silent else None, is_watched=is_watched)
    if not is_silent:
        return Check(CheckCode.TREES, Verdict.OK, text)
    text += f", with {counted(found.held, 'task')}: so many that the network is suspected, so their recovery is slow"
    fix = f"if you know that they are dead, recover their tasks now: {command}."
    return Check(CheckCode.TREES, Verdict.WARN, text, fix)


def _judge_lost(found: SilentTrees, *, command: str | None, is_watched: bool) -> Check:
    text = (
        f"{len(found.lost)} of {counted(found.known, 'tree')} without a session in PostgreSQL any more, so dead or cut off, with"
        f" {counted(found.held_by_lost, 'task')}: {some(found.lost)}"
    )
    at_once = (
        "" if command is None else f" If you know that they are dead, recover their tasks now: {command}."
    )
    if found.living:
        fix = f"none, if they are dead: a live supervisor recovers their tasks. If they live, look at their network.{at_once}"
        return Check(CheckCode.TREES, Verdict.WARN, text, fix)
    is_failed = is_watched and found.held_by_lost > 0
    return Check(
        CheckCode.TREES,
        Verdict.FAIL if is_failed else Verdict.WARN,
        f"{text}; no other tree lives to recover them",
        f"start a worker, which recovers them: everbeat worker MODULE:APP.{at_once}",
    )


def judge_bad_rows(found: Sequence[BadRow]) -> Check:
    """Whether rows hold values that everbeat never writes and cannot use."""
    if not found:
        return Check(CheckCode.BAD_ROWS, Verdict.OK, "no row holds a value that cannot be used")
    named = "; ".join(f"{row.table} {row.id}: {row.column} = {_value(row.value)}" for row in found)
    text = f"{counted(len(found), 'value')} cannot be used, and everbeat passes over the rows as far as it must: {named}"
    fix = "correct the columns with SQL, or delete the rows."
    return Check(CheckCode.BAD_ROWS, Verdict.WARN, text, fix)


def judge_stuck(workflows: Collection[UUID]) -> Check:
    """Whether workflows cannot go on: for a minute, no worker and no reconciler could take their next step."""
    if not workflows:
        return Check(CheckCode.STUCK, Verdict.OK, "every workflow goes on")
    named = some(sorted(map(str, workflows)))
    text = f"{counted(len(workflows), 'workflow')} cannot go on for a minute or more: {named}"
    fix = "ask for the reason: everbeat workflows reconcile; correct their rows with SQL, or cancel them: everbeat workflows cancel ID."
    return Check(CheckCode.STUCK, Verdict.WARN, text, fix)


def _value(value: str | None) -> str:
    return "NULL" if value is None else repr(value)


def judge_beats(gaps: Gaps, *, rules: SilenceRules) -> Check:
    """Whether beats come fast enough for the thresholds."""
    limits = [limit for limit in (rules.claimed_ms, rules.running_ms) if limit is not None]
    if not limits:
        return Check(CheckCode.BEATS, Verdict.OK, "nobody is judged by the age of beats: recovery is off")
    threshold_s = min(limits) / 1_000
    if gaps.median_s is None or gaps.p99_s is None or gaps.longest_s is None:
        return Check(CheckCode.BEATS, Verdict.OK, "no two beats are kept yet: nothing to measure")
    at = "" if gaps.ended_at is None else f" until {gaps.ended_at.isoformat(timespec='seconds')}"
    text = (
        f"{gaps.count} gaps between beats: median {gaps.median_s:.2f} s, p99 {gaps.p99_s:.2f} s, longest {gaps.longest_s:.2f} s"
        f" ({gaps.supervisor_id}{at}); the least stale threshold is {threshold_s:g} s{_outages(gaps)}"
    )
    if gaps.longest_s < threshold_s / 2:
        if (gaps.alone_s or 0) < threshold_s / 2:
            return Check(CheckCode.BEATS, Verdict.OK, text)
        fix = "if the database was there all the time, find what held up the only supervisor: its machine or the network."
        return Check(CheckCode.BEATS, Verdict.WARN, text, fix)
    fix = (
        f"raise the stale thresholds of RecoveryConfig to {math.ceil(3 * gaps.longest_s)} s or more, beat more often, or find"
        " what held that supervisor up: its machine, the network, the database."
    )
    verdict = Verdict.WARN if gaps.longest_s < threshold_s else Verdict.FAIL
    return Check(CheckCode.BEATS, verdict, text, fix)


def _outages(gaps: Gaps) -> str:
    """What was taken out of the gaps: no tree is declared dead for a silence of all."""
    if not gaps.outages or gaps.outage_s is None or gaps.outage_at is None:
        return ""
    last = gaps.outage_at.isoformat(timespec="seconds")
    return (
        f"; not counted: {counted(gaps.outages, 'outage')} of up to {gaps.outage_s:.0f} s, the last until {last}, in which no"
        " supervisor beat"
    )


def judge_sweeper(unswept: Unswept, *, rules: SilenceRules) -> Check:
    """Whether the dead are recovered."""
    if rules.claimed_ms is None and rules.running_ms is None:
        text = "automatic recovery is off: what dead workers hold stays until an operator sweeps"
        fix = "RecoveryConfig(auto_requeue_stale_claimed=True, auto_fail_stale_running=True), or 'everbeat sweep' by hand."
        return Check(CheckCode.SWEEPER, Verdict.WARN, text, fix)
    if unswept.abandoned:
        text = (
            f"no supervisor sweeps: {counted(unswept.abandoned, 'lease')} of trees that have no session in PostgreSQL any more, and no"
            " other supervisor lives"
        )
        fix = f"start a worker: everbeat worker MODULE:APP. See 'everbeat explain {unswept.task_id}'."
        return Check(CheckCode.SWEEPER, Verdict.FAIL, text, fix)
    overdue = unswept.silent + unswept.ended
    if overdue == 0:
        return Check(
            CheckCode.SWEEPER, Verdict.OK, "nothing that a dead worker holds is overdue for recovery"
        )
    late = "" if unswept.overdue_ms is None else f", by up to {unswept.overdue_ms / 1_000:.0f} s"
    text = (
        f"no supervisor sweeps: {counted(overdue, 'lease')} overdue for recovery{late} ({unswept.silent} of silent workers,"
        f" {unswept.ended} of ended ones)"
    )
    fix = f"see 'everbeat explain {unswept.task_id}'; recover them now with 'everbeat sweep'."
    return Check(CheckCode.SWEEPER, Verdict.FAIL, text, fix)


def judge_names(found: Sequence[Unserved]) -> Check:
    """Whether a live worker knows the name of every task that waits."""
    unknown = [each for each in found if each.served]
    if not unknown:
        return Check(CheckCode.NAMES, Verdict.OK, "no task waits for a worker that knows its name")
    told = some([f"{each.name} ({each.waiting} in queue {each.queue})" for each in unknown])
    text = f"tasks wait whose names no live worker knows: {told}"
    fix = "start workers of the app that has them, correct the senders, or cancel: everbeat tasks list --state pending --name NAME."
    return Check(CheckCode.NAMES, Verdict.WARN, text, fix)


def judge_queues(found: Sequence[Unserved]) -> Check:
    """Whether a live worker serves every queue in which tasks wait."""
    waiting: dict[str, int] = {}
    for each in found:
        if not each.served:
            waiting[each.queue] = waiting.get(each.queue, 0) + each.waiting
    if not waiting:
        return Check(CheckCode.QUEUES, Verdict.OK, "all queues with waiting tasks are served")
    told = some([f"{queue} ({count})" for queue, count in waiting.items()])
    fix = f"start workers for them: everbeat worker MODULE:APP --queues {shlex.quote(','.join(list(waiting)[:10]))}."
    return Check(CheckCode.QUEUES, Verdict.WARN, f"tasks wait in queues that nobody serves: {told}", fix)


def judge_pauses(pauses: Sequence[Pause]) -> Check:
    """Whether anything is paused."""
    if not pauses:
        return Check(CheckCode.PAUSES, Verdict.OK, "nothing is paused")
    told = some(
        [
            f"{each.kind} {each.name} by {each.paused_by}{f' ({each.reason})' if each.reason else ''}"
            for each in pauses
        ]
    )
    first = pauses[0]
    fix = f"when the reason is gone: everbeat {first.kind}s resume {shlex.quote(first.name)}."
    return Check(CheckCode.PAUSES, Verdict.WARN, f"paused: {told}", fix)


def judge_suspects(suspects: Suspects) -> Check:
    """Whether tasks are suspected of killing their workers."""
    if suspects.count == 0:
        return Check(CheckCode.SUSPECTS, Verdict.OK, "no task is suspected of killing its worker")
    text = (
        f"{counted(suspects.count, 'task')} may kill their worker and run alone, such as {suspects.name}"
        f" ({suspects.task_id})"
    )
    fix = f"see what their workers died of: everbeat recoveries --task {suspects.task_id}."
    return Check(CheckCode.SUSPECTS, Verdict.WARN, text, fix)


def judge_retention(
    oldest: Oldest, *, terminal_hours: int | None, beat_hours: int | None, state_hours: int | None
) -> Check:
    """Whether old records are taken away in time; a limit of None keeps them for ever."""
    kinds = (
        ("ended tasks", oldest.terminal_hours, terminal_hours, "terminal_record_retention_hours"),
        ("beats", oldest.beat_hours, beat_hours, "heartbeat_retention_hours"),
        ("snapshots", oldest.state_hours, state_hours, "worker_state_retention_hours"),
    )
    late = [
        f"{what} up to {age:.1f} h old ({name} is {limit})"
        for what, age, limit, name in kinds
        if age is not None and limit is not None and age > limit + _LATE_HOURS
    ]
    if not late:
        return Check(CheckCode.RETENTION, Verdict.OK, "nothing is kept longer than its retention says")
    text = f"retention lags: {'; '.join(late)}"
    return Check(
        CheckCode.RETENTION, Verdict.WARN, text, "a live worker prunes by itself; now: everbeat prune."
    )
