"""Pausing and resuming: what is not claimed for now, by an operator's word.

What lives here: `Pausing`, this part of an app. What may not: the brake that pauses by itself (`services.type_brake`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import uuid4

from everbeat.client.door import Door
from everbeat.client.quieting import Quieting
from everbeat.client.twins import awaiting, blocking
from everbeat.domain.checks import queue_name, remark, task_name
from everbeat.domain.pauses import Pause, PauseKind
from everbeat.errors import NotPaused, UnknownName
from everbeat.store import pauses
from everbeat.store.plan import Plan, ask


class Pausing(Quieting):
    """Running tasks go on; nothing more of what is paused is claimed. Every method has a twin to await."""

    def __init__(self, door: Door, *, alive_within_ms: int, queue_priorities: Mapping[str, int]) -> None:
        super().__init__(door, alive_within_ms=alive_within_ms, queue_priorities=queue_priorities)

    def _names_here(self, kind: PauseKind) -> Collection[str]:
        """The names that this program knows."""
        return {"default", *self._queue_priorities} if kind == "queue" else ()

    def _pause_task(self, name: str, /, *, reason: str | None = None) -> Plan[Pause]:
        """Lets no worker claim tasks of this function until it is resumed; raises UnknownName.

        What is paused stays as it is: the answer is that pause, with its reason, and says `already_paused`. A reason is
        1 to 1,000 printable characters.

        app.pause_task("render", reason="the renderer is being replaced")
        """
        return self._pause("task", task_name(name, subject="pause_task.name"), reason)

    def _pause_queue(self, name: str, /, *, reason: str | None = None) -> Plan[Pause]:
        """Lets no worker claim from this queue until it is resumed; the rest as `pause_task`."""
        return self._pause("queue", queue_name(name, subject="pause_queue.name"), reason)

    def _resume_task(self, name: str, /) -> Plan[Pause]:
        """Lets its tasks be claimed again, at once; answers the pause that ended. Raises NotPaused."""
        return self._resume("task", name)

    def _resume_queue(self, name: str, /) -> Plan[Pause]:
        """Lets it be served again, at once; answers the pause that ended. Raises NotPaused."""
        return self._resume("queue", name)

    def _list_pauses(self) -> Plan[list[Pause]]:
        """What is paused, newest first."""
        return ask(pauses.pauses())

    def _pause(self, kind: PauseKind, name: str, reason: str | None) -> Plan[Pause]:
        if reason is not None:
            remark(reason, subject=f"pause_{kind}.reason")
        known = self._names_here(kind)
        if name not in known:
            known = {*known, *(yield from ask(pauses.known_names(kind)))}
            if name not in known:
                raise UnknownName(kind, [name], known=known)
        standing, call = None, uuid4()
        while standing is None:  # None: somebody else paused or resumed it at the same moment
            standing = yield from ask(
                pauses.pause(kind, name, paused_by="operator", reason=reason, call=call)
            )
        return standing

    def _resume(self, kind: PauseKind, name: str) -> Plan[Pause]:
        # First which one: repeated after a lost reply, the order to end it says nothing of whether there was one.
        standing = {each.name: each for each in (yield from ask(pauses.pauses())) if each.kind == kind}
        if name not in standing:
            raise NotPaused(kind, name, paused=list(standing))
        yield from ask(pauses.resume(standing[name], channel=self.door.channel))
        return standing[name]

    pause_task = blocking(_pause_task)
    apause_task = awaiting(_pause_task)
    pause_queue = blocking(_pause_queue)
    apause_queue = awaiting(_pause_queue)
    resume_task = blocking(_resume_task)
    aresume_task = awaiting(_resume_task)
    resume_queue = blocking(_resume_queue)
    aresume_queue = awaiting(_resume_queue)
    list_pauses = blocking(_list_pauses)
    alist_pauses = awaiting(_list_pauses)
