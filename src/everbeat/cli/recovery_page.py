"""One recovery as people see it: everything an operator asks afterwards.

What lives here: the page of `everbeat recoveries show`. What may not: fetching it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from everbeat.cli.output import (
    amount,
    compact_json,
    duration,
    moment,
    optional_moment,
    show_heading,
    show_pairs,
    state,
)
from everbeat.domain.certificate import counted_from
from everbeat.domain.inspection import RecoveryInfo

_DONE: Final = {
    "requeue": "put back in its place, at no cost",
    "retry": "to be run again",
    "reschedule": "put off, as a hook said",
    "fail": "failed",
    "cancel": "cancelled, as was requested",
}
_CHARGED: Final = {
    "crash": "a crash: its process died under it alone",
    "loss": "a loss: its holder died or vanished, nobody knows by whose fault",
}


def show_recovery(recovery: RecoveryInfo) -> None:
    """Writes the page of one recovery to stdout."""
    death = _certificate(recovery.certificate)
    show_pairs(_task(recovery))
    show_heading("The death")
    show_pairs(_death(recovery, death))
    show_heading("What was done")
    show_pairs(_action(recovery, death))
    show_heading("What became of it")
    show_pairs(_aftermath(recovery))


def _certificate(stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The data of the certificate, which is kept as the error of the attempt."""
    data = None if stored is None else stored.get("data")
    return data if isinstance(data, Mapping) else {}


def _task(recovery: RecoveryInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "no", str(recovery.id)
    yield "task", str(recovery.task_id)
    yield "name", recovery.name
    yield "queue", recovery.queue
    yield "was", state(recovery.was)
    yield "attempt", str(recovery.attempt)


def _death(recovery: RecoveryInfo, death: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    pid = death.get("pid", recovery.pid)
    place = "not registered" if recovery.hostname is None else f"pid {pid} on {recovery.hostname}"
    yield "worker", f"{recovery.worker_id} ({place})"
    yield "supervisor", recovery.supervisor_id
    yield "cause", recovery.cause
    yield "exit code", _number(death.get("exit_code"))
    yield "signal", _number(death.get("signal"))
    yield "out of memory", "yes" if death.get("out_of_memory") else None
    rss = death.get("last_rss_bytes")
    yield "last memory", f"{rss / 2**20:.0f} MiB" if isinstance(rss, int) else None
    progress = death.get("last_progress")
    yield "last progress", None if progress is None else compact_json(progress)
    yield "last beat", optional_moment(recovery.last_beat_at)
    after_ms = recovery.noticed_after_ms
    since = counted_from(recovery.noticed_by)
    after = "" if after_ms is None else f", {duration(after_ms / 1_000)} after {since}"
    yield "noticed", f"by {recovery.noticed_by.replace('_', ' ')}{after}"


def _action(recovery: RecoveryInfo, death: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    done = _DONE.get(recovery.action)
    yield "recovered", f"{moment(recovery.noticed_at)} by {recovery.recovered_by}"
    yield "action", recovery.action if done is None else f"{recovery.action} ({done})"
    yield "hook", recovery.hook
    yield "charged", None if recovery.charge is None else _CHARGED.get(recovery.charge, recovery.charge)
    counts = [
        amount(death[name], one, plural=many)
        for name, one, many in _COUNTS
        if isinstance(death.get(name), int)
    ]
    yield "counted so far", ", ".join(counts) or None
    yield "poison", "yes: it is not run again" if death.get("poison") else None
    yield "suspect", "yes: it runs next alone in a process" if recovery.suspect else None
    yield "run again from", optional_moment(recovery.next_retry_at)


_COUNTS: Final = (("crash_count", "crash", "crashes"), ("loss_count", "loss", "losses"))


def _aftermath(recovery: RecoveryInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "ran again", optional_moment(recovery.ran_again_at) or "not so far"
    yield "on worker", recovery.ran_again_on
    yield "is now", "its record was pruned" if recovery.became is None else state(recovery.became)


def _number(value: object) -> str | None:
    return str(value) if isinstance(value, int) else None
