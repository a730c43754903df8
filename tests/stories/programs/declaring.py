"""An app whose code declares schedules, in two versions."""

from __future__ import annotations

import json
import os

from sample_tasks import effect  # type: ignore[import-not-found]  # a program stands beside it

from everbeat import App, RecoveryConfig
from everbeat.config import WorkerConfig


def app_of(version: int) -> App:
    """Return the app as this version of its code declares it."""
    app = App(
        os.environ["STORY_URL"],
        schema=os.environ["STORY_SCHEMA"],
        name="declaring",
        recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
        worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    )

    @app.task
    async def note(version: int) -> None:
        effect("start", version=version)

    app.schedule("shared", note.call(version), every="1s" if version == 1 else "2s", missed="all")
    app.schedule(f"only-in-{version}", note.call(version), every="1s", missed="all")
    return app
