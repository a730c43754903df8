"""Version 2 of the app that declares schedules, as its workers run it."""

from __future__ import annotations

from declaring import app_of  # type: ignore[import-not-found]  # a program stands beside it

app = app_of(2)
