"""Sends a task again with other arguments, and pages through the items of its streams."""

from __future__ import annotations

import shlex
from typing import Any, Final

import msgspec
from msgspec import Struct

from everbeat.client.database_access import database_of
from everbeat.client.options import SendOptions
from everbeat.domain.documents import plain_value
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.settings.units import When
from everbeat.errors.wording import amount, visible
from everbeat.store import rows
from everbeat.store.plan import ask
from everbeat.store.streams import list_items
from everbeat.web.filters import to_uuid
from everbeat.web.noting import noted
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused

_LONGEST: Final = 20_000
"""Longer arguments are not offered in a form."""
_ITEMS: Final = 100
_LARGEST_NUMBER: Final = 2_147_483_647
_LONGEST_NUMBER: Final = 10
"""Python refuses to read a number of thousands of digits."""


class SendAgain(Struct, frozen=True, kw_only=True):
    """How to send a task again: its arguments as text, the command, and whether the app knows the task and so its policy."""

    arguments: str
    command: str
    is_known: bool


def again_of(visit: Visit, task: TaskInfo) -> SendAgain | None:
    """Return how to send a task again, or None if it is a node, or if this user does not see all of its arguments."""
    is_hidden = visit.hiding.arguments(task.name, task.arguments) != task.arguments
    if is_hidden or task.workflow_id is not None or rows.is_marker(task.arguments):
        return None
    text = msgspec.json.encode(task.arguments, enc_hook=plain_value).decode()
    if len(text) > _LONGEST or visible(text) != text:
        return None
    words = [
        "everbeat",
        "send",
        task.name,
        "--args",
        text,
        "--queue",
        task.queue,
        "--priority",
        str(task.priority),
    ]
    return SendAgain(
        arguments=msgspec.json.format(text, indent=2),
        command=shlex.join(words),
        is_known=task.name in visit.app.tasks,
    )


async def send_again(visit: Visit) -> PageResult:
    """Send a new task of the same function to the same queue. Raises TaskNotFound, PayloadError or SendError."""
    task = await visit.app.ainfo(to_uuid(visit.path_values["id"], what="task"))
    again = again_of(visit, task)
    if again is None or not again.is_known:
        raise RequestRefused(
            409,
            "NOT_SENDABLE",
            "This task cannot be sent again from here, so nothing was sent.",
            fix="start the dashboard with the app that declares the task: everbeat web shop:app.",
        )
    return await send_noted(
        visit,
        task.name,
        decoded_arguments(visit.form.require("arguments")),
        note=f"again, after {task.id}",
        says="The task is sent again. This is the new task.",
        options={"queue": task.queue, "priority": task.priority},
    )


def decoded_arguments(text: str) -> Any:
    """Return arguments that were typed as JSON. Raises RequestRefused if they are not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestRefused(
            400, "WRONG_FORM", "The arguments are not JSON, so nothing was sent.", fix='write {"order": 7}.'
        ) from None


async def send_noted(
    visit: Visit,
    name: str,
    arguments: Any,
    *,
    note: str,
    says: str,
    when: When | None = None,
    options: SendOptions,
) -> ActionDone:
    """Send a task, note it in the audit log, and go to its page. Raises PayloadError, ConfigurationError or SendError."""
    handle = await visit.app.asend_by_name(name, arguments, when=when, **options)
    await noted(visit, "send", target=str(handle.id), affected=1, note=note, call=handle.id)
    return ActionDone(goto=visit.link(f"/tasks/{handle.id}"), says=says, data={"task_id": handle.id})


async def show_items(visit: Visit) -> PageResult:
    """Return a page of the items of a stream, the first ones first. Raises TaskNotFound."""
    task_id, name = to_uuid(visit.path_values["id"], what="task"), visit.query.get("name")
    after = visit.query.get("after") or "0"
    if not after.isdecimal() or len(after) > _LONGEST_NUMBER or int(after) > _LARGEST_NUMBER:
        raise RequestRefused(400, "WRONG_FORM", "The parameter 'after' is not the number of an item.")
    task = await visit.app.ainfo(task_id)
    streams = await visit.app.handle(task_id).astreams()
    chosen = name if name is not None else streams[0].name if streams else ""
    reading = database_of(visit.app).arun(ask(list_items(task_id, chosen, after=int(after), most=_ITEMS)))
    found = await visit.part("The items", reading, None)
    items = [
        {
            "number": each.number,
            "at": each.at,
            "attempt": each.attempt,
            "value": visit.hiding.payload(task.name, _decoded(each.value)),
        }
        for each in found or ()
    ]
    return Page(
        template="items.html",
        title=f"Stream {chosen}",
        says=f"{amount(len(items), 'item')} of the stream {chosen}"
        if items
        else "The stream has no further item",
        data={"task_id": task_id, "stream": chosen, "items": None if found is None else items},
        more={
            "name": task.name,
            "streams": streams,
            "older": items[-1]["number"] if len(items) == _ITEMS else None,
        },
        command=f"everbeat tasks stream {task_id} {shlex.quote(chosen)} --after {after}",
        targets=[str(task_id)],
    )


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
