"""The `App` methods that group failed tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from everbeat.client.database_access import DatabaseMethods
from everbeat.domain.inspection import FailurePage
from everbeat.domain.settings.checks import sought_or_none, whole
from everbeat.domain.settings.units import When, to_utc, to_when
from everbeat.store.failures import failure_groups
from everbeat.store.plan import Plan, ask

_limit: Final = whole(1, 10_000)


class FailureMethods(DatabaseMethods):
    """The `App` methods that summarise failures."""

    def failures(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        since: When | None = None,
        before: datetime | None = None,
        limit: int = 100,
    ) -> FailurePage:
        """Return the FAILED and EXPIRED tasks, grouped by name, error code and exception class, the latest group first.

        `since` and `before` bound the time of the failure. A retried task is not counted until it fails again. A call examines the 10,000
        FAILED tasks that failed last, and the EXPIRED tasks among the 10,000 newest tasks. If more tasks failed, `continue_before` of the
        result is not None (see `FailurePage`). Raises ConfigurationError if a filter is invalid.

        app.failures(since=timedelta(hours=1), queue="mail")
        """
        return self._run("failures", _groups(name, queue, since, before, limit))

    async def afailures(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        since: When | None = None,
        before: datetime | None = None,
        limit: int = 100,
    ) -> FailurePage:
        """Async version of `failures` that does not block the running event loop."""
        return await self._arun(_groups(name, queue, since, before, limit))


def _groups(
    name: str | None, queue: str | None, since: When | None, before: datetime | None, limit: int
) -> Plan[FailurePage]:
    return ask(
        failure_groups(
            name=sought_or_none(name, subject="name"),
            queue=sought_or_none(queue, subject="queue"),
            since=None if since is None else to_when(since, subject="since"),
            before=None if before is None else to_utc(before, subject="before"),
            limit=_limit(limit, subject="limit"),
        )
    )
