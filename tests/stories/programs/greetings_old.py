"""Version 1 of a task function: it does not take `language`."""

from __future__ import annotations

from deeds import app, effect  # type: ignore[import-not-found]  # a program stands beside it


@app.task
def greet(user: str) -> str:
    effect("start")
    return f"Hello {user}"
