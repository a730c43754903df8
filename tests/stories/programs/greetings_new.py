"""Version 2 of a task function: it has the new parameter `language`."""

from __future__ import annotations

from sample_tasks import app, effect  # type: ignore[import-not-found]  # a program stands beside it


@app.task
def greet(user: str, language: str = "en") -> str:
    effect("start")
    return f"{'Hallo' if language == 'de' else 'Hello'} {user}"
