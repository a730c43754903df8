"""The services of a supervisor that watch its worker processes, and report what the database must know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.service import Service
from everbeat.worker.children import Child
from everbeat.worker.cut_off_watch import CutOffWatch
from everbeat.worker.hang_watch import HangWatch
from everbeat.worker.posts import Post
from everbeat.worker.response_watch import ResponseWatch
from everbeat.worker.start_report import StartReport
from everbeat.worker.supervision import Supervision


def watches_of(
    supervision: Supervision,
    *,
    children: Callable[[], Sequence[Child]],
    posts: Callable[[], Sequence[Post]],
    events: EventBus,
    clock: Clock,
    nursery: Nursery,
) -> list[Service]:
    """The watches that the settings ask for."""
    config = supervision.config
    watches: list[Service] = [
        StartReport(
            supervision.session,
            supervisor_id=lambda: supervision.supervisor_id,
            problems=lambda: [post.start_problem for post in posts()],
            clock=clock,
        ),
        ResponseWatch(children=children, events=events, clock=clock),
        CutOffWatch(
            threshold_s=config.running_stale_threshold_ms / 1_000,
            children=children,
            disturbances=lambda: supervision.disturbances,
            can_connect=supervision.can_connect,
            events=events,
            clock=clock,
        ),
    ]
    if config.hang_timeout_ms is not None:
        watches.append(
            HangWatch(
                timeout_s=config.hang_timeout_ms / 1_000,
                children=children,
                running=supervision.running,
                events=events,
                clock=clock,
                nursery=nursery,
            )
        )
    return watches
