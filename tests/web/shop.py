"""The app of a dashboard that a test serves as a process. It takes its database from the environment."""

from __future__ import annotations

import os

from everbeat import App

app = App(schema=os.environ.get("EVERBEAT_SCHEMA"), name="shop")


@app.task(name="charge")
def charge(order: str = "o-1") -> None: ...
