"""The metrics of one supervisor and its worker processes, from their memory. They are collected only if they are served."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Sequence
from operator import add
from typing import Final, get_args

from everbeat.domain.metrics import names
from everbeat.domain.metrics.events import EventTotals
from everbeat.domain.metrics.text import Histogram, MetricsText, bounded
from everbeat.domain.series import CLASS_BOUNDS_S, AttemptResult, RateCounts, RefusedVerb
from everbeat.maintenance.scheduler import TicksDecided
from everbeat.recovering.orders import AGE, CHILD_EXIT, SESSION, STARTUP
from everbeat.runtime.events import Event, EventBus, WorkerExited
from everbeat.store import migrations
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.supervisor import Supervisor

NOTICED_BY: Final = (CHILD_EXIT, SESSION, AGE, STARTUP)
_RECOVERIES: Final = [
    *(("CLAIMED", way, "requeue") for way in NOTICED_BY),
    *(("RUNNING", way, action) for way in NOTICED_BY for action in ("retry", "fail")),
]
"""The usual combinations, which are present from the start. Prometheus does not see the first increase of a series that was absent."""
_RESULTS: Final[tuple[str, ...]] = get_args(AttemptResult)
_OUTCOMES: Final = ("sent", "skipped", "missed")
_IN_ORDER: Final = ("true", "false")
_COUNTED: Final = (WorkerExited, TicksDecided)
_VERBS: Final[tuple[str, ...]] = get_args(RefusedVerb)
_USUAL_QUEUE: Final = "default"


class ProcessMetrics:
    """Counts what a supervisor does, and reads the rest from it. All methods are called on its event loop."""

    def __init__(self, supervisor: Supervisor, events: EventBus, *, version: str) -> None:
        self._supervisor = supervisor
        self._version = version
        self._beats = Histogram.empty(CLASS_BOUNDS_S)
        self._late = Histogram.empty(CLASS_BOUNDS_S)
        self._exits = Counter(dict.fromkeys(((each,) for each in _IN_ORDER), 0))
        self._ticks = Counter(dict.fromkeys(((each,) for each in _OUTCOMES), 0))
        self._unsubscribe = events.subscribe(self._count, listens=lambda kind: issubclass(kind, _COUNTED))

    def attach(self, supervision: Supervision) -> None:
        """Count the heartbeats of this supervision."""
        supervision.heartbeat.on_acknowledged = self._beats.observe

    def close(self) -> None:
        """Stop counting."""
        self._unsubscribe()

    def _count(self, event: Event) -> None:
        match event:
            case WorkerExited(in_order=in_order):
                self._exits[(str(in_order).lower(),)] += 1
            case TicksDecided(sent=sent, skipped=skipped, missed=missed, late_s=late_s):
                self._ticks.update({("sent",): sent, ("skipped",): skipped, ("missed",): missed})
                for seconds in late_s:
                    self._late.observe(max(0.0, seconds))
            case _:
                pass

    def read(self) -> MetricsText:
        """Return the metrics now."""
        found = MetricsText()
        newest = migrations.known_migrations()[-1].version
        found.add(names.BUILD_INFO, {(self._version, str(newest), platform.python_version()): 1})
        supervision = self._supervisor.supervision
        ready, wanted = self._supervisor.process_counts
        found.add(names.PROCESSES, {("ready",): ready, ("wanted",): wanted})
        found.add(names.PROCESS_EXITS, self._exits)
        is_up = supervision is not None and supervision.outages.reason is None
        found.add(names.DATABASE_UP, float(is_up))
        found.add(names.BEAT_WRITE_SECONDS, {(): self._beats})
        found.add(names.BEATS_FAILED, 0 if supervision is None else supervision.heartbeat.failures)
        self._add_slots(found)
        totals = [] if supervision is None else supervision.rates.totals()
        _add_attempts(found, totals)
        queues = {_USUAL_QUEUE, *self._served(), *(each.queue for each in totals)}
        events = EventTotals() if supervision is None else supervision.rates.event_totals()
        _add_events(found, events, queues=queues, tasks={each.name for each in totals})
        found.add(names.SCHEDULE_TICKS, self._ticks)
        found.add(names.SCHEDULE_LATE_SECONDS, {(): self._late})
        return found

    def _served(self) -> set[str]:
        """Return the queues that the worker processes name. Workers of all queues name none."""
        supervision = self._supervisor.supervision
        workers = [] if supervision is None else supervision.workers
        return {queue for each in workers for queue in each.queues or ()}

    def _add_slots(self, found: MetricsText) -> None:
        supervision = self._supervisor.supervision
        ticks = (
            []
            if supervision is None
            else [each.tick for each in supervision.workers if each.tick is not None]
        )
        running, slots = sum(tick.running for tick in ticks), sum(tick.slots for tick in ticks)
        found.add(names.SLOTS, {("busy",): running, ("free",): max(0, slots - running)})
        found.add(names.LOOP_LAG_SECONDS, max((tick.loop_lag_ms for tick in ticks), default=0.0) / 1_000)


def _add_attempts(found: MetricsText, totals: Sequence[RateCounts]) -> None:
    by_task = {(each.queue, each.name): each for each in totals}
    found.add(names.ATTEMPTS_STARTED, bounded({key: each.started for key, each in by_task.items()}, add))
    ended = {(*key, result): getattr(each, result) for key, each in by_task.items() for result in _RESULTS}
    found.add(names.ATTEMPTS_ENDED, bounded(ended, add))
    found.add(names.TASKS_EXPIRED, bounded({key: each.expired for key, each in by_task.items()}, add))
    waits: dict[tuple[str], Histogram] = {}
    for each in totals:
        waited = Histogram(CLASS_BOUNDS_S, each.waits, each.wait_s)
        waits[(each.queue,)] = waits[(each.queue,)].plus(waited) if (each.queue,) in waits else waited
    found.add(names.TASK_WAIT_SECONDS, bounded(waits, Histogram.plus))
    runs = {key: Histogram(CLASS_BOUNDS_S, each.runs, each.run_s) for key, each in by_task.items()}
    found.add(names.TASK_RUN_SECONDS, bounded(runs, Histogram.plus))


def _add_events(
    found: MetricsText, events: EventTotals, *, queues: Collection[str], tasks: Collection[str]
) -> None:
    """Add the counts of recoveries, refused writes and sends, with zeros for the queues and task functions that are known."""
    found.add(names.TASKS_SENT, bounded(bounded(events.sent, add, label=1), add))
    usual = {(queue, *labels): 0 for queue in sorted(queues) for labels in _RECOVERIES}
    found.add(names.RECOVERIES, bounded(usual | events.recoveries, add))
    empty = {(way,): Histogram.empty(CLASS_BOUNDS_S) for way in NOTICED_BY}
    found.add(names.NOTICE_SECONDS, empty | events.notices)
    found.add(names.RERUN_SECONDS, empty | events.reruns)
    unharmed = {(name,): 0 for name in sorted(tasks)}
    found.add(names.POISONED, bounded(unharmed | events.poisoned, add))
    found.add(names.LATE_WRITES_REFUSED, {(verb,): 0 for verb in _VERBS} | events.refused)
