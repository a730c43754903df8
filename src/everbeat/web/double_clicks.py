"""Carries out a form once if it is submitted twice, as by a double click. The second answer would be the one that the browser shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

from msgspec import Struct

from everbeat.runtime.clock import Clock, SystemClock
from everbeat.web.page import PageResult

WITHIN_S: Final = 1.0
"""For how long after an action the same form of the same user is the same click."""
_MOST_USERS: Final = 1_000


class _Click(Struct):
    """The latest form of a user: what it requests, its answer, and until when it counts after its end."""

    form: Hashable
    answer: asyncio.Future[PageResult]
    until: float = float("inf")


class DoubleClicks:
    """Remembers the latest form of each user for a second. Another form of the same user ends that, so two actions can follow each other."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._clicks: dict[str, _Click] = {}

    async def once(self, user: str, form: Hashable, act: Callable[[], Awaitable[PageResult]]) -> PageResult:
        """Return what `act` returns, or what it has returned for the same form a moment ago. Its error is raised for both."""
        known = self._clicks.get(user)
        if known is not None and known.form == form and self._clock.monotonic() < known.until:
            return await asyncio.shield(known.answer)
        click = _Click(form, asyncio.get_running_loop().create_future())
        if len(self._clicks) >= _MOST_USERS:
            self._clicks.clear()
        self._clicks[user] = click
        try:
            answer = await act()
        except Exception as problem:
            click.answer.set_exception(problem)
            click.answer.exception()  # it might have no second reader
            raise
        except BaseException:
            click.answer.cancel()
            raise
        else:
            click.answer.set_result(answer)
            return answer
        finally:
            click.until = self._clock.monotonic() + WITHIN_S
