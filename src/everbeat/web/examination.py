"""Runs the checks of `everbeat doctor` in the background, so that no page waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.app import App
from everbeat.domain.doctor.findings import Check
from everbeat.errors import EverbeatError
from everbeat.examination import Examination
from everbeat.runtime.clock import SystemClock

_LONG_TRANSACTION_S: Final = 300.0
_FRESH_S: Final = 60.0
_ENDS_WITHIN_S: Final = 10.0
_log = logging.getLogger("everbeat.web")


class Examined(Struct, frozen=True, kw_only=True):
    """The checks of the latest examination, and when it began. Both are missing before the first. `is_running`: a new one is on its way."""

    checks: Sequence[Check] = ()
    at: datetime | None = None
    is_running: bool = False
    problem: str | None = None


class Examiner:
    """Keeps the latest examination, and starts another one if it is older than a minute. One runs at a time, for all viewers."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._last = Examined()
        self._is_running = False
        self._ended_at: float | None = None
        self._thread: threading.Thread | None = None

    def look(self, *, again: bool = False) -> Examined:
        """Return the latest examination. Start another one if it is old, or if `again` is set."""
        with self._lock:
            is_old = self._ended_at is None or self._clock.monotonic() - self._ended_at > _FRESH_S
            if (is_old or again) and not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(
                    target=self._examine, name="everbeat-examination", daemon=True
                )
                self._thread.start()
            last = self._last
            return Examined(checks=last.checks, at=last.at, is_running=self._is_running, problem=last.problem)

    def wait(self) -> None:
        """Wait until the current examination has ended, if there is one, for at most 10 s."""
        if self._thread is not None:
            self._thread.join(_ENDS_WITHIN_S)

    def _examine(self) -> None:
        began_at = self._clock.wall()
        try:
            found = list(Examination(self._app, long_transaction_s=_LONG_TRANSACTION_S).checks())
            examined = Examined(checks=found, at=began_at)
        except EverbeatError as problem:
            _log.warning("The checks could not run: %s", problem.message)
            examined = Examined(at=began_at, problem=problem.message)
        except Exception as problem:  # noqa: BLE001 - the thread must not end without an answer
            examined = Examined(at=began_at, problem=f"The examination failed with {type(problem).__name__}.")
        with self._lock:
            self._last, self._is_running, self._ended_at = examined, False, self._clock.monotonic()
