"""The `App` methods that group failed tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from everbeat.client.database_access import DatabaseMethods
from everbeat.domain.inspection import FailurePage
from everbeat.domain.labels import split_labels
from everbeat.domain.settings.checks import sought_or_none, whole
from everbeat.domain.settings.units import When, to_past, to_past_moment
from everbeat.store.failures import MOST_GROUPED, failure_groups
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
        labels: Mapping[str, str | None] | None = None,
        limit: int = 100,
    ) -> FailurePage:
        """Return the FAILED and EXPIRED tasks, grouped by name, error code and exception class, the latest group first.

        `since` and `before` bound the time of the failure, and `labels` selects as in `list_tasks`. A retried task is not counted until it
        fails again. A call examines the 10,000 FAILED tasks that failed last, and the EXPIRED tasks among the 10,000 newest tasks. If more
        tasks failed, `continue_before` of the result is not None (see `FailurePage`). Raises ConfigurationError if a filter is invalid.

        app.failures(since=timedelta(hours=1), queue="mail")
        """
        return self._run("failures", failure_page(name, queue, since, before, labels, limit))

    async def afailures(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        since: When | None = None,
        before: datetime | None = None,
        labels: Mapping[str, str | None] | None = None,
        limit: int = 100,
    ) -> FailurePage:
        """Async version of `failures` that does not block the running event loop."""
        return await self._arun(failure_page(name, queue, since, before, labels, limit))


def failure_page(
    name: str | None,
    queue: str | None,
    since: When | None,
    before: datetime | None,
    labels: Mapping[str, str | None] | None,
    limit: int,
    *,
    most: int = MOST_GROUPED,
) -> Plan[FailurePage]:
    """Return a plan that groups failures, as `App.failures`. It examines `most` tasks in place of 10,000."""
    with_value, keys = split_labels(labels, subject="labels")
    return ask(
        failure_groups(
            name=sought_or_none(name, subject="name"),
            queue=sought_or_none(queue, subject="queue"),
            since=None if since is None else to_past(since, subject="since"),
            before=None if before is None else to_past_moment(before, subject="before"),
            labels=with_value,
            label_keys=keys,
            limit=_limit(limit, subject="limit"),
            most=most,
        )
    )
