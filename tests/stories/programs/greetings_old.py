"""Version 1 of a task function: it has no parameter `language`."""

from __future__ import annotations

from sample_tasks import app, effect  # type: ignore[import-not-found]  # a program stands beside it


@app.task
def greet(user: str) -> str:
    effect("start")
    return f"Hello {user}"
