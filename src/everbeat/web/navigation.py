"""The navigation: the pages in the order in which an operator needs them, with their icons and keys."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Place(Struct, frozen=True):
    """A page of the navigation. `key` opens it after `g`. `is_below` puts it into the second part."""

    path: str
    title: str
    icon: str
    key: str
    is_below: bool = False


PLACES: Final = (
    Place("/pulse", "Pulse", "i-beat", "p"),
    Place("/tasks", "Tasks", "i-tasks", "t"),
    Place("/recoveries", "Recoveries", "i-rescue", "r"),
    Place("/workers", "Workers", "i-workers", "w"),
    Place("/workflows", "Workflows", "i-flow", "f"),
    Place("/queues", "Queues and limits", "i-queue", "q"),
    Place("/schedules", "Schedules", "i-clock", "s"),
    Place("/inbox", "Inbox", "i-inbox", "i", is_below=True),
    Place("/system", "System", "i-system", "y", is_below=True),
    Place("/audit", "Audit", "i-audit", "a", is_below=True),
)
