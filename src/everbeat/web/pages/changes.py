"""Notifies the viewers of a page that an operator has changed what it shows. Which actions concern a page is a table of this file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from everbeat.domain.bulk_actions import BulkVerb
from everbeat.domain.pulse.actions import ActionMemory
from everbeat.domain.pulse.sample import SampledAction
from everbeat.errors import DatabaseError
from everbeat.web import rendering, wording
from everbeat.web.live import Parts, PulsePicture
from everbeat.web.page import Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused

_ALL: Final = frozenset(f"{verb.value}_all" for verb in BulkVerb)
_OF_TASKS: Final = _ALL | {verb.value for verb in BulkVerb} | {"signal", "answer", "recover", "bury_workers"}
_OF_WORKFLOWS: Final = frozenset(
    {
        "pause_workflow",
        "resume_workflow",
        "cancel_workflow",
        "retry_workflow",
        "reconcile_workflows",
        "signal",
    }
)
_OF_SCHEDULES: Final = frozenset(
    {
        "put_schedule",
        "pause_schedule",
        "resume_schedule",
        "run_schedule",
        "backfill_schedule",
        "delete_schedule",
    }
)
_SENDS: Final = frozenset({"send", "run_schedule", "backfill_schedule"})
CONCERNS: Final[Mapping[str, Callable[[str], bool]]] = {
    "tasks": (_OF_TASKS | _OF_WORKFLOWS | _SENDS | {"cancel_batch"}).__contains__,
    "workflows": (_OF_WORKFLOWS | _ALL | {"retry", "cancel"}).__contains__,
    "queues": (
        _OF_TASKS
        | _SENDS
        | {"pause", "resume", "set_limit", "clear_limit", "cancel_batch", "cancel_workflow"}
    ).__contains__,
    "schedules": _OF_SCHEDULES.__contains__,
    "inbox": (_OF_TASKS | {"cancel_workflow"}).__contains__,
    "workers": frozenset({"quiet_workers", "resume_workers", "bury_workers", "recover"}).__contains__,
    "audit": lambda _: True,
}
"""Which actions change what a page shows, by the first part of its path. The live pages show changes without a notice."""
_LIVE: Final = frozenset({"/workers"})
_SHOWN: Final = 3
_MOST_TARGETS: Final = 20


async def mark_of(visit: Visit) -> str | None:
    """Return where in the order of actions the visited page is read, or None if it has no notices. Never raises DatabaseError."""
    if _place(visit) is None:
        return None
    try:
        return await visit.web.live.mark()
    except DatabaseError:
        return None  # the page says so about each of its parts


def _place(visit: Visit) -> str | None:
    path = visit.request.scope["path"].removeprefix(visit.request.scope.get("root_path", ""))
    place: str = path.removeprefix("/").partition("/")[0]
    return place if place in CONCERNS and path not in _LIVE else None


def address_of(visit: Visit, page: Page) -> str | None:
    """Return the address of the stream that notifies the viewers of a page of changes, or None if it needs none."""
    if visit.mark is None or page.status != 200 or page.refresh_s is not None or visit.at is not None:
        return None
    targets = [target[:200] for target in page.targets[:_MOST_TARGETS]]
    return visit.link("/changes/stream", of=_place(visit), after=visit.mark, target=targets)


async def stream(visit: Visit) -> PageResult:
    """Stream a notice when an action changes what a page shows, and the state of all trees for its header."""
    example = visit.link("/changes/stream", of="tasks", after=await visit.web.live.mark())
    place, mark = (visit.query.parameter(name, example=example) for name in ("of", "after"))
    if place not in CONCERNS:
        raise RequestRefused(400, "UNKNOWN_CHOICE", "There is no such page.")
    targets = frozenset(visit.query.all("target")[:_MOST_TARGETS])
    key = f"changes {visit.link('/')} {place} {mark} {sorted(targets)}"
    render = partial(_parts, visit, place, targets, visit.web.live.place_of(mark))
    return await visit.web.live.stream(visit, key, render, moves=False)


def _parts(
    visit: Visit,
    place: str,
    targets: Collection[str],
    since: Callable[[ActionMemory], int],
    picture: PulsePicture,
) -> Parts:
    header = rendering.fragment(visit, "pulse_vital.html", {"crew": picture.crew, "mini": ""})
    actions = picture.memory.actions
    found = [each for each in actions.since(since(actions)) if concerns(each, place, targets)]
    if not found:
        return {"live-vital": header}
    told = {"told": [_told(each) for each in found[:_SHOWN]], "more": max(0, len(found) - _SHOWN)}
    return {"live-vital": header, "live-changed": rendering.fragment(visit, "changed.html", told)}


def concerns(action: SampledAction, place: str, targets: Collection[str]) -> bool:
    """Return whether an action changes what a page shows. A page about one thing names its `targets`; a list has none."""
    if targets:
        named = set() if action.target is None else {action.target, *action.target.split(", ")}
        return bool(named & set(targets)) or (action.action in _ALL and place in ("tasks", "workflows"))
    return CONCERNS[place](action.action)


def _told(action: SampledAction) -> str:
    target = "all that match" if action.action in _ALL else action.target or ""
    verb = action.action.removesuffix("_all").replace("_", " ")
    shown = wording.short_id(target) if len(target) == _UUID_LENGTH else target[:80]
    return f"{action.actor}: {verb} {shown}".strip()


_UUID_LENGTH: Final = 36
