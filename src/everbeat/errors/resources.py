"""The errors of an app's resources."""

from __future__ import annotations

from everbeat.errors.tree import EverbeatError, WorkerError


class ResourceFailed(WorkerError):
    """A resource of the app cannot be opened in this process, so the process runs no tasks."""

    code = "RESOURCE_FAILED"


class ResourceNotOpen(EverbeatError):
    """The value of a resource was read in a process, or at a time, in which the resource is not open."""

    code = "RESOURCE_NOT_OPEN"

    def __init__(self, name: str, *, is_async: bool) -> None:
        block = "async with app.aresources():" if is_async else "with app.resources():"
        super().__init__(
            f"Resource {name!r} is not open in this process: workers open it before they run tasks, and other programs do so themselves.",
            fix=f"put the code into `{block}`.",
        )
        self.name = name
