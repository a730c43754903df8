"""Queues and limits: the tasks that wait, the pauses, and the holders of permits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from msgspec import Struct, structs

from everbeat.app import App
from everbeat.client.database_access import database_of
from everbeat.domain.charts import ended_of
from everbeat.domain.inspection import Pause, QueueInfo, WorkerInfo, with_empty_queues
from everbeat.domain.limit.inspection import LimitInfo
from everbeat.domain.series import OTHER_NAME, RateBucket
from everbeat.errors.wording import amount, some
from everbeat.store import past, series
from everbeat.store.diagnosis import known_queues
from everbeat.store.limits import list_gates, list_holders, list_limits
from everbeat.store.plan import ask
from everbeat.web import wording
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.charts import chart_content, charts_of, chosen_range, due_of
from everbeat.web.past import read_past
from everbeat.web.queue_rates import MINUTES, QueueRates, read_rates
from everbeat.web.refusals import RequestRefused
from everbeat.web.strip_drawing import sparkline
from everbeat.web.vitals import counted_queues

_MOST_WORKERS: Final = 1_000
_MOST_DETAILED: Final = 12
"""For how many limits with permits in use the holders are read."""
_MOST_KEYS: Final = 1_000
"""Of how many keys of limits the waiting tasks are counted."""
_MOST_LISTED: Final = 100
"""How many keys in use and how many holders of each of these limits are read."""
_MOST_PLACES: Final = 60
_MOST_KEYS_SHOWN: Final = 10
_SLOW_S: Final = 60.0
_MOST_LINES: Final = 100
"""For how many queues a line is drawn."""


class QueueRow(Struct, frozen=True, kw_only=True):
    """A queue, its pause, and how many live workers serve it (None: the workers could not be read)."""

    queue: QueueInfo
    pause: Pause | None
    served_by: int | None


async def show(visit: Visit) -> PageResult:
    """Return the queues with their counts, the pauses, and the limits with the holders of their permits. With `queue`, add its charts."""
    if visit.at is not None:
        return await show_past(visit, visit.at)
    app = visit.app
    access, stale_ms = database_of(app), app.recovery.claimed_stale_threshold_ms
    found = await visit.parts(
        queues=("The queues", access.arun(ask(counted_queues())), None),
        known=("The queues without tasks", access.arun(ask(known_queues(stale_ms=stale_ms))), ()),
        pauses=("The pauses", app.alist_pauses(), None),
        workers=("The workers", app.alist_active_workers(limit=_MOST_WORKERS), None),
        limits=("The limits", _limits(app), None),
        rates=("The rates", read_rates(visit), None),
    )
    queues, pauses, limits = found["queues"], found["pauses"], found["limits"]
    if queues is not None:  # also those without tasks, so that they can be paused
        declared = {each.name: each.priority for each in app.queue_configs}
        queues = with_empty_queues(queues, _also_known(visit, found), declared=declared)
    rows = _rows(queues or [], pauses or [], found["workers"])
    history = await _history(visit, [row.queue.name for row in rows[:_MOST_LINES]])
    rates: dict[str, QueueRates] = found["rates"] or {}
    data = {
        "queues": queues,
        "pauses": pauses,
        "limits": limits,
        "rates": None if found["rates"] is None else [*rates.values()],
        "charts": history["charts"],
    }
    more = {
        **history,
        "rows": rows,
        "rate_of": rates,
        "minutes": MINUTES,
        "everything": next((pause for pause in pauses or () if pause.kind == "all"), None),
        "task_pauses": [pause for pause in pauses or () if pause.kind == "task"],
        "most_places": _MOST_PLACES,
        "most_listed": _MOST_LISTED,
        "most_keys": _MOST_KEYS_SHOWN,
        "slow_s": _SLOW_S,
    }
    return Page(
        template="queues.html",
        title="Queues and limits",
        says=_sentence(queues, pauses, rows),
        data=data,
        more=more,
        command="everbeat queues",
    )


def _also_known(visit: Visit, found: Mapping[str, Any]) -> set[str]:
    """Return the queues that are listed although they have no task: those of workers and the app, and those in which an attempt ran."""
    ran: dict[str, QueueRates] = found["rates"] or {}
    own = (each.options.queue for each in visit.app.tasks.values())
    return {*found["known"], *own, *(name for name in ran if name not in ("", OTHER_NAME))}


async def _history(visit: Visit, queues: Sequence[str]) -> dict[str, Any]:
    """Return the charts of the chosen queue, and a line for each of these queues."""
    chosen, queue = chosen_range(visit), visit.query.get("queue")
    lines = await due_of(visit, queues)
    charts = None if queue is None else await charts_of(visit, queue=queue)
    drawn = {name: sparkline(line) for name, line in lines.items() if any(line)}
    content = {"chart_range": chosen} if queue is None else chart_content(visit, charts, path="/queues")
    return {"charts": charts, "lines": drawn, "chart_queue": queue, **content}


async def show_past(visit: Visit, at: datetime) -> PageResult:
    """Return the queues as the last sample before a moment found them, what they did in that minute, and what operators had set."""
    view, queue = await read_past(visit, at), visit.query.get("queue")
    access = database_of(visit.app)
    minute = timedelta(seconds=_RATE_S)
    found = await visit.parts(
        depths=("The depths", access.arun(ask(past.depths(at))), None),
        rates=(
            "The rates",
            access.arun(ask(series.rates(since=at - minute, until=at, bucket_s=_RATE_S, by_queue=True))),
            [],
        ),
        charts=("The charts", charts_of(visit, queue=queue), None),
    )
    is_known, depths, charts = found["depths"] is not None, found["depths"] or [], found["charts"]
    rates: dict[str, RateBucket] = {rate.queue: rate for rate in found["rates"]}
    names = dict.fromkeys([*(depth.queue for depth in depths), *sorted(rates)])
    by_queue = {depth.queue: depth for depth in depths}
    due = sum(depth.due for depth in depths)
    age_s = (at - depths[0].at).total_seconds() if depths else 0.0
    before = f", {wording.span(age_s)} before" if age_s > _OLD_SAMPLE_S else ""
    return Page(
        template="queues_past.html",
        title="Queues as of then",
        says=f"{amount(due, 'task')} {'was' if due == 1 else 'were'} due, in {amount(len(names), 'queue')}{before}"
        if depths
        else "No queue had a live task, or no sample is kept"
        if is_known
        else "The queues could not be read",
        data={
            **view.document(),
            "depths": depths if is_known else None,
            "rates": found["rates"],
            "settings": view.settings,
            "charts": charts,
        },
        more={
            **chart_content(visit, charts, path="/queues"),
            "view": view,
            "rows": [(name, by_queue.get(name), rates.get(name)) for name in names],
            "sampled_at": depths[0].at if depths else None,
            "is_known": is_known,
            "ended_of": ended_of,
        },
    )


_RATE_S: Final = 60
_OLD_SAMPLE_S: Final = 60.0
"""The page says how old an older sample is: with no worker, or after two days, the last one is not of that moment."""


async def _limits(app: App) -> list[LimitInfo]:
    """Return the limits. Those with permits in use or with waiting tasks come first, with their keys in use and the holders of their permits."""
    access = database_of(app)
    listed = await access.arun(ask(list_limits(most_lines=_MOST_KEYS)))
    busy = [limit for limit in listed if limit.held or limit.waiting]
    busy.sort(key=lambda limit: (-limit.waiting, -limit.held, limit.name))
    names = [limit.name for limit in busy[:_MOST_DETAILED]]
    if not names:
        return listed
    gates = list_gates(names, most_lines=_MOST_KEYS, most_listed=_MOST_LISTED)
    in_use, holders = await asyncio.gather(
        access.arun(ask(gates)), access.arun(ask(list_holders(names, most_listed=_MOST_LISTED)))
    )
    detailed = [
        structs.replace(
            limit, in_use=tuple(in_use.get(limit.name, ())), holders=tuple(holders.get(limit.name, ()))
        )
        for limit in busy[:_MOST_DETAILED]
    ]
    return [*detailed, *(limit for limit in listed if limit.name not in names)]


def _rows(
    queues: Sequence[QueueInfo], pauses: Sequence[Pause], workers: Sequence[WorkerInfo] | None
) -> list[QueueRow]:
    paused = {pause.name: pause for pause in pauses if pause.kind == "queue"}
    rows = [
        QueueRow(queue=queue, pause=paused.get(queue.name), served_by=_serving(queue.name, workers))
        for queue in queues
    ]
    return sorted(
        rows, key=lambda row: (-(row.queue.oldest_due_s or 0.0), -row.queue.pending, row.queue.name)
    )


def _serving(queue: str, workers: Sequence[WorkerInfo] | None) -> int | None:
    """Return how many workers can claim tasks of a queue. Those that are silent, lost, quiet or about to stop claim nothing."""
    if workers is None:
        return None
    return sum(
        worker.queues is None or queue in worker.queues
        for worker in workers
        if not (worker.is_stale or worker.session_lost or worker.draining or worker.quiet_since is not None)
    )


def _sentence(
    queues: Sequence[QueueInfo] | None, pauses: Sequence[Pause] | None, rows: Sequence[QueueRow]
) -> str:
    if queues is None:
        return "The queues could not be read"
    if any(pause.kind == "all" for pause in pauses or ()):
        return "Everything is paused: no worker claims a task"
    unserved = [row.queue.name for row in rows if row.served_by == 0 and row.queue.pending]
    if unserved:
        verb = "has" if len(unserved) == 1 else "have"
        return f"{some(unserved, limit=3)} {verb} due tasks, and no worker serves {'it' if len(unserved) == 1 else 'them'}"
    due = [row for row in rows if row.queue.pending]
    if not due:
        return "No queue has a due task" if not rows else f"Nothing is due in {amount(len(rows), 'queue')}"
    first = due[0].queue
    if due[0].pause is not None:
        return f"{first.name} is paused, and its oldest due task has waited for {wording.span(first.oldest_due_s)}"
    return (
        f"{first.name} waits longest: its oldest due task has waited for {wording.span(first.oldest_due_s)}"
    )


async def pause(visit: Visit) -> PageResult:
    """Pause a queue or a task function, or everything. Running tasks continue."""
    kind, reason = _kind(visit), visit.form.get("reason")
    match kind:
        case "queue":
            found = await visit.app.apause_queue(visit.form.require("name"), reason=reason)
        case "task":
            found = await visit.app.apause_task(visit.form.require("name"), reason=reason)
        case _:
            found = await visit.app.apause_all(reason=reason)
    what = "Everything" if kind == "all" else found.name
    says = (
        f"{what} was already paused."
        if found.already_paused
        else f"{what} is paused. Running tasks continue."
    )
    return ActionDone(goto=visit.link("/queues"), says=says, data={"pause": found})


async def resume(visit: Visit) -> PageResult:
    """Lift the pause of a queue, of a task function, or of everything."""
    kind = _kind(visit)
    match kind:
        case "queue":
            found = await visit.app.aresume_queue(visit.form.require("name"))
        case "task":
            found = await visit.app.aresume_task(visit.form.require("name"))
        case _:
            found = await visit.app.aresume_all()
    what = "Everything" if kind == "all" else found.name
    return ActionDone(goto=visit.link("/queues"), says=f"{what} is resumed.", data={"pause": found})


def _kind(visit: Visit) -> Literal["queue", "task", "all"]:
    kind: Any = visit.form.get("kind") or "queue"
    if kind not in ("queue", "task", "all"):
        raise RequestRefused(400, "UNKNOWN_CHOICE", "The kind is not queue, task or all.")
    chosen: Literal["queue", "task", "all"] = kind
    return chosen
