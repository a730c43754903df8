"""The checks of everbeat's own work: heartbeats, recovery, failures, worker starts, and tasks that no worker claims."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from everbeat.domain.doctor.findings import (
    BadRow,
    Check,
    CheckCode,
    CheckVerdict,
    Crew,
    Gaps,
    Oldest,
    SilentTrees,
    Suspects,
    Unresponsive,
    Unserved,
    Unswept,
)
from everbeat.domain.explain.reasons import (
    FailingStart,
    Reason,
    ReasonCode,
    RestartingSupervisor,
    SilenceRules,
    counted,
)
from everbeat.domain.inspection import Pause
from everbeat.domain.recovery.decision import UNRESPONSIVE_S, is_mass
from everbeat.errors import TaskError
from everbeat.errors.tasks import shown_code
from everbeat.errors.wording import amount, brief_duration, some, storable

_LATE_HOURS: Final = 3.0
SWEEPS_MISSED: Final = 2
"""If a lease is overdue by this many sweeps, no process is sweeping."""


def judge_crew(crew: Crew) -> Check:
    """Judge whether any workers are alive."""
    if crew.workers:
        text = f"{counted(crew.workers, 'live worker')} of {counted(crew.supervisors, 'live supervisor')}"
        if not crew.quiet:
            return CheckCode.WORKERS.ok(text)
        quiet = f"made quiet by an operator: {some(list(crew.quiet))}"
        resume = "when they should claim again: everbeat workers quiet --resume --all."
        if crew.has_work and len(crew.quiet) >= crew.supervisors:
            return CheckCode.WORKERS.warn(f"{text}, all of them {quiet}; tasks are open", resume)
        return CheckCode.WORKERS.ok(f"{text}; {quiet}", resume)
    since = (
        "; none was ever registered"
        if crew.last_beat_at is None
        else f"; the last heartbeat was received at {crew.last_beat_at.isoformat(timespec='seconds')}"
    )
    fix = "start one: everbeat worker MODULE:APP."
    lost = f" ({counted(crew.lost, 'tree')} without a session in PostgreSQL)" if crew.lost else ""
    if crew.has_work:
        return CheckCode.WORKERS.fail(f"no live worker{lost}, and tasks wait{since}", fix)
    return CheckCode.WORKERS.warn(f"no live worker{lost}{since}", fix)


def judge_unresponsive(found: Sequence[Unresponsive]) -> Check:
    """Judge whether the processes of live workers respond to their supervisors."""
    if not found:
        text = f"the process of every live worker has responded within {UNRESPONSIVE_S:g} s"
        return CheckCode.UNRESPONSIVE.ok(text)
    named = [
        f"{each.worker_id} (pid {each.pid} on {each.hostname}) for {each.lag_s:.0f} s at its last snapshot, {each.snapshot_s:.0f} s ago,"
        f" with {counted(each.held, 'task')}"
        for each in found
    ]
    text = (
        f"worker processes that did not respond, because they are stopped or code blocks them: {some(named)}"
    )
    fix = (
        f"inspect the process, or release its tasks: everbeat workers release {found[0].worker_id}. To replace such processes"
        " automatically, set RecoveryConfig(hang_timeout_ms=...)."
    )
    return CheckCode.UNRESPONSIVE.warn(text, fix)


def judge_trees(found: SilentTrees, *, command: str, is_watched: bool) -> Check:
    """Judge whether any trees have lost their sessions, or whether enough trees are silent to delay their recovery.

    `command` recovers the tasks of the silent trees at once. `is_watched` means that the lost trees have had no session for
    the whole session grace period.
    """
    text = f"{found.silent} of {counted(found.known, 'tree')} silent for two heartbeat intervals or more"
    is_silent = is_mass(silent=found.silent, known=found.known)
    if found.lost:
        return _judge_lost(found, command=command if is_silent else None, is_watched=is_watched)
    if not is_silent:
        return CheckCode.TREES.ok(text)
    text += f", with {counted(found.held, 'task')}. The network is suspected because they are many, which delays their recovery"
    fix = f"if you know that they are dead, recover their tasks now: {command}."
    return CheckCode.TREES.warn(text, fix)


def _judge_lost(found: SilentTrees, *, command: str | None, is_watched: bool) -> Check:
    text = (
        f"without a session in PostgreSQL, so dead or cut off: {len(found.lost)} of {counted(found.known, 'tree')}, with"
        f" {counted(found.held_by_lost, 'task')}: {some(found.lost)}"
    )
    at_once = (
        "" if command is None else f" If you know that they are dead, recover their tasks now: {command}."
    )
    if found.living:
        fix = f"if they are dead, nothing: a live supervisor recovers their tasks. If they live, check their network.{at_once}"
        return CheckCode.TREES.warn(text, fix)
    is_failed = is_watched and found.held_by_lost > 0
    return Check(
        CheckCode.TREES,
        CheckVerdict.FAIL if is_failed else CheckVerdict.WARN,
        f"{text}; no other tree lives to recover them",
        f"start a worker, which recovers them: everbeat worker MODULE:APP.{at_once}",
    )


def judge_bad_rows(found: Sequence[BadRow]) -> Check:
    """Judge whether rows contain values that everbeat never writes and cannot use."""
    if not found:
        return CheckCode.BAD_ROWS.ok("no row holds an unusable value")
    named = "; ".join(f"{row.table} {row.id}: {row.column} = {_value(row.value)}" for row in found)
    text = f"{counted(len(found), 'value')} cannot be used, so everbeat skips the rows where it must: {named}"
    fix = "correct the columns with SQL, or delete the rows."
    return CheckCode.BAD_ROWS.warn(text, fix)


def judge_stuck(workflows: Collection[UUID]) -> Check:
    """Judge whether workflows are stuck, because neither a worker nor reconciliation has carried out their next step for a minute."""
    if not workflows:
        return CheckCode.STUCK.ok("no workflow is stuck")
    named = some(sorted(map(str, workflows)))
    text = f"{counted(len(workflows), 'workflow')} stuck for a minute or more: {named}"
    fix = "see the reason: everbeat workflows reconcile; then correct their rows with SQL, or cancel them: everbeat workflows cancel ID."
    return CheckCode.STUCK.warn(text, fix)


def _value(value: str | None) -> str:
    return "NULL" if value is None else repr(value)


def judge_beats(gaps: Gaps, *, rules: SilenceRules) -> Check:
    """Judge whether heartbeats are frequent enough for the thresholds."""
    limits = [limit for limit in (rules.claimed_ms, rules.running_ms) if limit is not None]
    if not limits:
        return CheckCode.BEATS.ok("the age of heartbeats has no effect, because automatic recovery is off")
    threshold_s = min(limits) / 1_000
    if gaps.median_s is None or gaps.p99_s is None or gaps.longest_s is None:
        return CheckCode.BEATS.ok("too few heartbeats have been recorded to measure their intervals")
    at = "" if gaps.ended_at is None else f" until {gaps.ended_at.isoformat(timespec='seconds')}"
    text = (
        f"{amount(gaps.count, 'gap')} between beats: median {gaps.median_s:.2f} s, p99 {gaps.p99_s:.2f} s, longest {gaps.longest_s:.2f} s"
        f" ({gaps.supervisor_id}{at}); the lowest stale threshold is {threshold_s:g} s{_outages(gaps)}"
    )
    if gaps.longest_s < threshold_s / 2:
        if (gaps.alone_s or 0) < threshold_s / 2:
            return CheckCode.BEATS.ok(text)
        fix = "if the database was up all the time, find what delayed the only supervisor: its machine or the network."
        return CheckCode.BEATS.warn(text, fix)
    fix = (
        f"raise the stale thresholds of RecoveryConfig to {math.ceil(3 * gaps.longest_s)} s or more, or send heartbeats more often. Otherwise, find"
        " what delayed that supervisor: its machine, the network or the database."
    )
    verdict = CheckVerdict.WARN if gaps.longest_s < threshold_s else CheckVerdict.FAIL
    return Check(CheckCode.BEATS, verdict, text, fix)


def _outages(gaps: Gaps) -> str:
    """Return a note about the outages, which the gaps exclude because no tree is declared dead while all trees are silent."""
    if not gaps.outages or gaps.outage_s is None or gaps.outage_at is None:
        return ""
    last = gaps.outage_at.isoformat(timespec="seconds")
    return (
        f"; not counted: {counted(gaps.outages, 'outage')} of up to {gaps.outage_s:.0f} s, the last until {last}, in which no"
        " supervisor beat"
    )


def judge_sweeper(unswept: Unswept, *, rules: SilenceRules) -> Check:
    """Judge whether the tasks of dead workers are recovered."""
    if rules.claimed_ms is None and rules.running_ms is None:
        text = "automatic recovery is off: dead workers keep their tasks until an operator sweeps"
        fix = "set RecoveryConfig(auto_requeue_stale_claimed=True, auto_fail_stale_running=True), or run 'everbeat sweep' by hand."
        return CheckCode.SWEEPER.warn(text, fix)
    if unswept.abandoned:
        text = (
            f"no supervisor sweeps: {counted(unswept.abandoned, 'lease')} of trees that have lost their session in PostgreSQL, and no"
            " other supervisor lives"
        )
        fix = f"start a worker: everbeat worker MODULE:APP. See 'everbeat explain {unswept.task_id}'."
        return CheckCode.SWEEPER.fail(text, fix)
    overdue = unswept.silent + unswept.ended
    if overdue == 0:
        return CheckCode.SWEEPER.ok("no task of a dead worker is overdue for recovery")
    late = "" if unswept.overdue_ms is None else f", by up to {unswept.overdue_ms / 1_000:.0f} s"
    text = (
        f"no supervisor sweeps: {counted(overdue, 'lease')} overdue for recovery{late} ({unswept.silent} of silent workers,"
        f" {unswept.ended} of workers that have exited)"
    )
    fix = f"see 'everbeat explain {unswept.task_id}'; recover them now with 'everbeat sweep'."
    return CheckCode.SWEEPER.fail(text, fix)


def judge_names(found: Sequence[Unserved]) -> Check:
    """Judge whether every waiting task has a live worker that knows its name."""
    unknown = [each for each in found if each.served]
    if not unknown:
        return CheckCode.NAMES.ok("no task is waiting for a worker that knows its name")
    names = some([f"{each.name} ({each.waiting} in queue {each.queue})" for each in unknown])
    text = f"no live worker knows the names of these waiting tasks: {names}"
    fix = "start workers of the app that has them, correct the senders, or cancel them: everbeat tasks list --state pending --name NAME."
    return CheckCode.NAMES.warn(text, fix)


def judge_queues(found: Sequence[Unserved]) -> Check:
    """Judge whether every queue with waiting tasks is served by a live worker."""
    waiting: dict[str, int] = {}
    for each in found:
        if not each.served:
            waiting[each.queue] = waiting.get(each.queue, 0) + each.waiting
    if not waiting:
        return CheckCode.QUEUES.ok("all queues with waiting tasks are served")
    queues = some([f"{queue} ({count})" for queue, count in waiting.items()])
    fix = f"start workers for them: everbeat worker MODULE:APP --queues {shlex.quote(','.join(list(waiting)[:10]))}."
    return CheckCode.QUEUES.warn(f"no live worker serves these queues with waiting tasks: {queues}", fix)


def judge_pauses(pauses: Sequence[Pause]) -> Check:
    """Judge whether any task functions or queues are paused."""
    if not pauses:
        return CheckCode.PAUSES.ok("nothing is paused")
    names = some(
        [
            f"{'everything' if each.kind == 'all' else f'{each.kind} {each.name}'} by {each.paused_by}{f' ({each.reason})' if each.reason else ''}"
            for each in pauses
        ]
    )
    first = next((each for each in pauses if each.kind == "all"), pauses[0])
    resume = "resume --all" if first.kind == "all" else f"{first.kind}s resume {shlex.quote(first.name)}"
    fix = f"when the reason no longer applies: everbeat {resume}."
    return CheckCode.PAUSES.warn(f"paused: {names}", fix)


def judge_suspects(suspects: Suspects) -> Check:
    """Judge whether any tasks are suspected of killing their workers."""
    if suspects.count == 0:
        return CheckCode.SUSPECTS.ok("no task is suspected of killing its worker")
    text = (
        f"{counted(suspects.count, 'task')} might kill their worker and run alone, such as {suspects.name}"
        f" ({suspects.task_id})"
    )
    fix = f"see how their workers died: everbeat recoveries --task {suspects.task_id}."
    return CheckCode.SUSPECTS.warn(text, fix)


def judge_retention(
    oldest: Oldest, *, terminal_hours: int | None, beat_hours: int | None, state_hours: int | None
) -> Check:
    """Judge whether old records are deleted in time. A limit of None keeps the records forever."""
    kinds = (
        ("ended tasks", oldest.terminal_hours, terminal_hours, "terminal_record_retention_hours"),
        ("beats", oldest.beat_hours, beat_hours, "heartbeat_retention_hours"),
        ("snapshots", oldest.state_hours, state_hours, "worker_state_retention_hours"),
    )
    late = [
        f"{kind} up to {age:.1f} h old ({name} is {limit})"
        for kind, age, limit, name in kinds
        if age is not None and limit is not None and age > limit + _LATE_HOURS
    ]
    if not late:
        return CheckCode.RETENTION.ok("no record is kept longer than its retention")
    text = f"retention lags: {'; '.join(late)}"
    return CheckCode.RETENTION.warn(
        text, "start a worker, which prunes by itself, or run 'everbeat prune' now."
    )


WINDOW_S: Final = 600
MOST_FAILURES: Final = 1_000
_MOST_NAMED: Final = 5


class RecentFailures(msgspec.Struct, frozen=True):
    """The recent failures of one task function with the same error code and exception class. The first failure was `since_s` seconds ago."""

    name: str
    code: str
    type: str
    count: int
    since_s: float


def judge_failures(found: Sequence[RecentFailures]) -> Check:
    """Judge whether tasks have recently failed. `found` has the most frequent failure first."""
    window = f"{WINDOW_S // 60} minutes"
    if not found:
        return CheckCode.FAILURES.ok(f"no task failed in the last {window}")
    total = sum(each.count for each in found)
    since_s = max(each.since_s for each in found)
    kinds = [
        f"{each.name}: {shown_code(TaskError(each.code or '?', type=each.type))} {amount(each.count, 'time')},"
        f" first {brief_duration(each.since_s)} ago"
        for each in found[:_MOST_NAMED]
    ]
    if (others := len(found) - _MOST_NAMED) > 0:
        kinds.append(f"and {counted(others, 'more kind')}")
    a_second = total / max(since_s, 1.0)
    rate = f"{a_second:{',.0f' if a_second >= 10 else '.2g'}} a second since the first, {brief_duration(since_s)} ago"
    if total >= MOST_FAILURES:
        head, rate = f"{total:,} or more tasks", f"of the newest {total:,}: {rate}"
    else:
        head = counted(total, "task")
    fix = "run 'everbeat tasks list --state failed', then 'everbeat explain ID'; the logs of the workers have each traceback."
    return CheckCode.FAILURES.warn(f"{head} failed in the last {window} ({rate}): {'; '.join(kinds)}", fix)


HANDLERS_WINDOW_S: Final = 3_600
"""Retention keeps records for at least this long. So a handler that was sent for a failure within this time still has its row."""


def judge_handlers(found: Sequence[UUID]) -> Check:
    """Judge whether the failure handlers of the tasks that failed in the last hour were sent."""
    if not found:
        return CheckCode.HANDLERS.ok(
            "the failure handlers of all tasks that failed in the last hour were sent"
        )
    text = f"the failure handlers of {counted(len(found), 'task')} that failed in the last hour were not sent: {some([*map(str, found)])}"
    fix = "the stored policies of these tasks are unusable, as after a change by hand; see the reasons in PostgreSQL's log."
    return CheckCode.HANDLERS.warn(text, fix)


_LONGEST_TEXT: Final = 500
_LONGEST_READ: Final = 5_000
"""The limit is ten times the stored length, so that truncation here cannot leave part of a URL in the stored text."""
_MOST_TREES_NAMED: Final = 3
_LOGINS: Final = re.compile(r"(?<=://)\S*@")
_SECRETS: Final = re.compile(r"(?i)((?:password|passwd|secret|token)['\"]?\s*[=:]\s*)\S+")


class StartProblem(msgspec.Struct, frozen=True):
    """Why a supervisor cannot start a worker process. `since` is when the consecutive failures began, on the supervisor's clock."""

    text: str
    since: float


def start_problem_text(message: str) -> str:
    """Return the first paragraph of a message on one line, shortened and without passwords.

    Exceptions from imported user code can contain anything, even the URL of a service with its password.
    """
    line = " ".join(message[:_LONGEST_READ].strip().partition("\n\n")[0].split())
    return storable(_SECRETS.sub(r"\1***", _LOGINS.sub("***@", line)), limit=_LONGEST_TEXT)


def judge_starts(found: Sequence[FailingStart]) -> Check:
    """Judge whether every live supervisor can start worker processes."""
    if not found:
        return CheckCode.STARTS.ok("every live supervisor can start worker processes")
    named = [
        f"supervisor {each.supervisor_id} (pid {each.pid} on {each.hostname}, {_workers(each)}): {each.problem}"
        for each in found
    ]
    text = f"supervisors cannot start worker processes: {some(named)}"
    fix = (
        "correct the cause, or deploy the previous version again. The supervisor tries again at least every 30 s. To restart it:"
        f" kill -TERM {found[0].pid} on {found[0].hostname}. Its log has the traceback."
    )
    return CheckCode.STARTS.fail(text, fix)


def why_not_started(found: Sequence[FailingStart]) -> Iterator[Reason]:
    """Yield a reason for each supervisor that cannot start workers that might run the task."""
    for number, each in enumerate(found[:_MOST_TREES_NAMED], start=1):
        text = f"supervisor {each.supervisor_id} (pid {each.pid}) on {each.hostname} cannot start a worker process: {each.problem}"
        others = len(found) - _MOST_TREES_NAMED if number == _MOST_TREES_NAMED else 0
        yield Reason(
            code=ReasonCode.WORKER_NOT_STARTED,
            text=f"{text}; and {counted(others, 'more supervisor')} cannot" if others > 0 else text,
            since=each.since,
            blocked_by=each.supervisor_id,
            command="everbeat workers",
        )


def no_worker(
    text: str,
    *,
    since: datetime | None,
    restarting: Sequence[RestartingSupervisor],
    failing: Sequence[FailingStart] = (),
) -> Reason:
    """Return the reason "no worker is alive". The reason advises starting a worker only if no live supervisor is about to start one."""
    return Reason(
        code=ReasonCode.NO_WORKER,
        text=f"{text}{coming(restarting)}",
        since=since,
        command="everbeat workers" if restarting or failing else "everbeat worker MODULE:APP",
    )


def coming(restarting: Sequence[RestartingSupervisor]) -> str:
    """Return the final clause of a sentence, which names the live supervisors that are about to start workers, or an empty string."""
    if not restarting:
        return ""
    first, others = restarting[0], len(restarting) - 1
    more = (
        f", and so {'does' if others == 1 else 'do'} {counted(others, 'more supervisor')}" if others else ""
    )
    return f"; live supervisor {first.supervisor_id} (pid {first.pid}) on {first.hostname} restarts its worker processes{more}"


def _workers(start: FailingStart) -> str:
    if start.processes is None:
        return f"with {amount(start.workers, 'worker')}"
    return f"with {start.workers} of {amount(start.processes, 'worker')}"
