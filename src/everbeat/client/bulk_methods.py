"""The `App` methods that change single tasks, and those that act on all tasks that match filters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Unpack
from uuid import UUID

from everbeat.client import acting
from everbeat.client.database_access import DatabaseAccess, DatabaseMethods
from everbeat.client.handle import to_task_id
from everbeat.client.sender import CallSender
from everbeat.client.waiter import Deadline
from everbeat.domain.bulk_actions import AUDITED, AuditEntry, BulkActionInfo, BulkVerb, Operator
from everbeat.domain.filters import AuditFilters, BulkFilters
from everbeat.domain.settings.checks import one_of, public, queue_name, remark, sought_or_none, whole
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration, When, to_past
from everbeat.domain.task.policy import HIGHEST_PRIORITY, LOWEST_PRIORITY
from everbeat.store import audit, bulk
from everbeat.store.plan import Plan, ask

_limit: Final = whole(1, 10_000)
_number: Final = whole(1, 2**63 - 1)
_audited: Final = one_of(*AUDITED)
_priority: Final = whole(LOWEST_PRIORITY, HIGHEST_PRIORITY)


@public
class BulkAction(DatabaseMethods):
    """A bulk action that was requested. `info` shows it as this process saw it last.

    The supervisors carry it out, also after this process has ended. If no supervisor is alive, the action waits for one.
    """

    def __init__(self, info: BulkActionInfo, *, database: DatabaseAccess) -> None:
        self.info = info
        self._database = database

    def __repr__(self) -> str:
        return f"<BulkAction {self.info.id} {self.info.action} {self.info.state}>"

    @property
    def id(self) -> UUID:
        """Return the id. Raises ConfigurationError for a dry run, which has none."""
        if self.info.id is None:
            raise refused(
                None, subject="BulkAction.id", code="MISSING", rule="does not exist, because a dry run is not stored",
                fix="request the action without dry_run",
            )  # fmt: skip
        return self.info.id

    def refresh(self) -> BulkActionInfo:
        """Read the action again. Return `info`."""
        return self._seen(self._run("refresh", acting.described(self.id)))

    async def arefresh(self) -> BulkActionInfo:
        """Async version of `refresh` that does not block the running event loop."""
        return self._seen(await self._arun(acting.described(self.id)))

    def outcome(self, *, timeout: Duration | None = None) -> BulkActionInfo:
        """Wait until the action has ended, and return `info`. Raises WaitTimeout if `timeout` expires first."""
        if self.info.state.has_ended:
            return self.info
        until = Deadline(timeout)
        return self._seen(self._run("outcome", acting.ended(self.id, until=until), within_s=until.within_s))

    async def aoutcome(self, *, timeout: Duration | None = None) -> BulkActionInfo:
        """Async version of `outcome` that does not block the running event loop."""
        if self.info.state.has_ended:
            return self.info
        until = Deadline(timeout)
        return self._seen(await self._arun(acting.ended(self.id, until=until), within_s=until.within_s))

    def cancel(self, *, by: str | None = None) -> BulkActionInfo:
        """Stop the action after its current portion. Tasks that it has changed stay as they are."""
        return self._seen(self._run("cancel", acting.stopped(self._database, self.id, by=by)))

    async def acancel(self, *, by: str | None = None) -> BulkActionInfo:
        """Async version of `cancel` that does not block the running event loop."""
        return self._seen(await self._arun(acting.stopped(self._database, self.id, by=by)))

    def _seen(self, info: BulkActionInfo) -> BulkActionInfo:
        self.info = info
        return info


class BulkMethods(DatabaseMethods):
    """The `App` methods that change waiting and ended tasks, singly or all that match, and the audit log."""

    _sender: CallSender

    def run_now(self, task_id: UUID | str, /) -> None:
        """Make a waiting task due now: a scheduled task, or one that waits for its next retry.

        Raises ActionRefused if the task is not PENDING, is already due, waits for an event, or sleeps until a fixed time. Raises
        TaskNotFound if it does not exist.
        """
        self._run("run_now", acting.changed(self._database, BulkVerb.RUN_NOW, to_task_id(task_id)))

    async def arun_now(self, task_id: UUID | str, /) -> None:
        """Async version of `run_now` that does not block the running event loop."""
        await self._arun(acting.changed(self._database, BulkVerb.RUN_NOW, to_task_id(task_id)))

    def move(self, task_id: UUID | str, /, *, queue: str) -> None:
        """Move a PENDING task to another queue.

        Raises ActionRefused if the task is not PENDING, or belongs to the line of a serial queue. Raises TaskNotFound if it does not exist.
        """
        self._run(
            "move",
            acting.changed(
                self._database,
                BulkVerb.MOVE,
                to_task_id(task_id),
                parameters=self._to_queue(queue, subject="move.queue"),
            ),
        )

    async def amove(self, task_id: UUID | str, /, *, queue: str) -> None:
        """Async version of `move` that does not block the running event loop."""
        await self._arun(
            acting.changed(
                self._database,
                BulkVerb.MOVE,
                to_task_id(task_id),
                parameters=self._to_queue(queue, subject="move.queue"),
            )
        )

    def reprioritise(self, task_id: UUID | str, /, *, priority: int) -> None:
        """Give a PENDING task another priority. Tasks with lower numbers run first.

        Raises ActionRefused if the task is not PENDING. Raises TaskNotFound if it does not exist.
        """
        self._run(
            "reprioritise",
            acting.changed(
                self._database,
                BulkVerb.REPRIORITISE,
                to_task_id(task_id),
                parameters={"to_priority": _priority(priority, subject="reprioritise.priority")},
            ),
        )

    async def areprioritise(self, task_id: UUID | str, /, *, priority: int) -> None:
        """Async version of `reprioritise` that does not block the running event loop."""
        await self._arun(
            acting.changed(
                self._database,
                BulkVerb.REPRIORITISE,
                to_task_id(task_id),
                parameters={"to_priority": _priority(priority, subject="reprioritise.priority")},
            )
        )

    def delete(self, task_id: UUID | str, /) -> None:
        """Delete an ended task with its records, also from `history`.

        Raises ActionRefused if the task has not ended, belongs to a stored workflow, or has a parent that has not ended. A task that was
        sent less than an hour ago is refused, too. Raises TaskNotFound if it does not exist. The key of a deleted task is free.
        """
        self._run("delete", acting.changed(self._database, BulkVerb.DELETE, to_task_id(task_id)))

    async def adelete(self, task_id: UUID | str, /) -> None:
        """Async version of `delete` that does not block the running event loop."""
        await self._arun(acting.changed(self._database, BulkVerb.DELETE, to_task_id(task_id)))

    def retry_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Retry all FAILED, CANCELLED and EXPIRED tasks that match the filters (see `BulkFilters`).

        Only tasks that had ended before the call are retried, each of them once. Tasks of workflows are skipped, and so are tasks whose key
        another task has. The supervisors carry the action out. An identical call joins it while it has not ended. Raises ConfigurationError
        if a filter is invalid, or if there is none.

        action = app.retry_all(name="sync", error="TIMEOUT", since=timedelta(hours=8))
        """
        plan = self._requested("retry_all", BulkVerb.RETRY, filters)
        return BulkAction(self._run("retry_all", plan), database=self._database)

    async def aretry_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `retry_all` that does not block the running event loop."""
        plan = self._requested("retry_all", BulkVerb.RETRY, filters)
        return BulkAction(await self._arun(plan), database=self._database)

    def cancel_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Cancel all live tasks that match the filters, and their children.

        Only tasks that were sent before the call are cancelled. Running tasks are asked to stop. The supervisors carry the action out. An
        identical call joins it while it has not ended. Raises ConfigurationError if a filter is invalid, or if there is none.

        app.cancel_all(queue="mail", state="PENDING").outcome(timeout="1m")
        """
        plan = self._requested("cancel_all", BulkVerb.CANCEL, filters)
        return BulkAction(self._run("cancel_all", plan), database=self._database)

    async def acancel_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `cancel_all` that does not block the running event loop."""
        plan = self._requested("cancel_all", BulkVerb.CANCEL, filters)
        return BulkAction(await self._arun(plan), database=self._database)

    def run_all_now(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Make all scheduled and retrying tasks that match the filters due now.

        Tasks that wait for an event or sleep until a fixed time are skipped. The supervisors carry the action out. An identical call joins
        it while it has not ended. Raises ConfigurationError if a filter is invalid, or if there is none.
        """
        plan = self._requested("run_all_now", BulkVerb.RUN_NOW, filters)
        return BulkAction(self._run("run_all_now", plan), database=self._database)

    async def arun_all_now(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `run_all_now` that does not block the running event loop."""
        plan = self._requested("run_all_now", BulkVerb.RUN_NOW, filters)
        return BulkAction(await self._arun(plan), database=self._database)

    def move_all(self, *, to: str, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Move all PENDING tasks that match the filters to the queue `to`.

        Tasks in the lines of serial queues are skipped. The supervisors carry the action out. An identical call joins it while it has not
        ended. Raises ConfigurationError if a filter is invalid, or if there is none.

        app.move_all(to="slow", queue="mail", name="report")
        """
        plan = self._requested("move_all", BulkVerb.MOVE, filters, self._to_queue(to, subject="move_all.to"))
        return BulkAction(self._run("move_all", plan), database=self._database)

    async def amove_all(self, *, to: str, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `move_all` that does not block the running event loop."""
        plan = self._requested("move_all", BulkVerb.MOVE, filters, self._to_queue(to, subject="move_all.to"))
        return BulkAction(await self._arun(plan), database=self._database)

    def reprioritise_all(self, *, to: int, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Give all PENDING tasks that match the filters the priority `to`.

        Tasks with lower numbers run first. The supervisors carry the action out. An identical call joins it while it has not ended. Raises
        ConfigurationError if a filter is invalid, or if there is none.
        """
        plan = self._requested(
            "reprioritise_all",
            BulkVerb.REPRIORITISE,
            filters,
            {"to_priority": _priority(to, subject="reprioritise_all.to")},
        )
        return BulkAction(self._run("reprioritise_all", plan), database=self._database)

    async def areprioritise_all(self, *, to: int, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `reprioritise_all` that does not block the running event loop."""
        plan = self._requested(
            "reprioritise_all",
            BulkVerb.REPRIORITISE,
            filters,
            {"to_priority": _priority(to, subject="reprioritise_all.to")},
        )
        return BulkAction(await self._arun(plan), database=self._database)

    def delete_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Delete all ended tasks that match the filters, with their records, also from `history`.

        Tasks of stored workflows, tasks with a live parent, and tasks that were sent less than an hour ago are skipped. The supervisors
        carry the action out. An identical call joins it while it has not ended. Raises ConfigurationError if a filter is invalid, or if
        there is none.
        """
        plan = self._requested("delete_all", BulkVerb.DELETE, filters)
        return BulkAction(self._run("delete_all", plan), database=self._database)

    async def adelete_all(self, **filters: Unpack[BulkFilters]) -> BulkAction:
        """Async version of `delete_all` that does not block the running event loop."""
        plan = self._requested("delete_all", BulkVerb.DELETE, filters)
        return BulkAction(await self._arun(plan), database=self._database)

    def bulk_actions(self, *, limit: int = 100) -> list[BulkActionInfo]:
        """Return bulk actions: those that have not ended, and then those that were requested last."""
        return self._run("bulk_actions", ask(bulk.actions(limit=_limit(limit, subject="bulk_actions.limit"))))

    async def abulk_actions(self, *, limit: int = 100) -> list[BulkActionInfo]:
        """Async version of `bulk_actions` that does not block the running event loop."""
        return await self._arun(ask(bulk.actions(limit=_limit(limit, subject="bulk_actions.limit"))))

    def bulk_action(self, action_id: UUID | str, /) -> BulkAction:
        """Return a bulk action that was requested earlier or by another process. Raises BulkActionNotFound if it does not exist."""
        info = self._run("bulk_action", acting.described(_to_action_id(action_id)))
        return BulkAction(info, database=self._database)

    async def abulk_action(self, action_id: UUID | str, /) -> BulkAction:
        """Async version of `bulk_action` that does not block the running event loop."""
        return BulkAction(
            await self._arun(acting.described(_to_action_id(action_id))), database=self._database
        )

    def audit_log(self, *, limit: int = 100, **filters: Unpack[AuditFilters]) -> list[AuditEntry]:
        """Return the actions of operators that match the filters (see `AuditFilters`), newest first. They are kept for 90 days.

        app.audit_log(since=timedelta(days=1), action="retry_all")
        """
        return self._run("audit_log", _entries(limit, **filters))

    async def aaudit_log(self, *, limit: int = 100, **filters: Unpack[AuditFilters]) -> list[AuditEntry]:
        """Async version of `audit_log` that does not block the running event loop."""
        return await self._arun(_entries(limit, **filters))

    def acting_as(self, name: str, /) -> AbstractContextManager[None]:
        """Note the actions inside a `with` block in the audit log, under this name.

        Bulk actions are always noted. Other actions of Python code, such as `retry` and `pause_queue`, are noted only inside such a block.
        The block also covers the asyncio tasks that it creates. `name` must consist of 1 to 1,000 printable characters.

        with app.acting_as("ann"):
            app.pause_queue("mail", reason="the bank is down")
        """
        return self._database.acting_as(Operator(remark(name, subject="acting_as.name"), "python"))

    def _requested(
        self, method: str, verb: BulkVerb, filters: BulkFilters, parameters: Mapping[str, Any] = {}
    ) -> Plan[BulkActionInfo]:
        given: Any = dict(filters)
        return acting.requested(
            self._database,
            verb,
            method=method,
            parameters=parameters,
            everything=given.pop("everything", False),
            dry_run=given.pop("dry_run", False),
            by=given.pop("by", None),
            reason=given.pop("reason", None),
            action_id=self._sender.ids.next(),
            filters=given,
        )

    def _to_queue(self, name: str, *, subject: str) -> dict[str, str]:
        queue = queue_name(name, subject=subject)
        if queue in self._sender.serial_queues:
            raise refused(
                name, subject=subject, code="CONTRADICTION", rule="is a serial queue, and a task cannot join its line later",
                fix="choose a queue that is not serial, or send the task again",
            )  # fmt: skip
        return {"to_queue": queue}


def _to_action_id(value: object) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(str(value))
    except ValueError:
        raise refused(
            value, subject="action_id", code="WRONG_TYPE", rule="must be a UUID, or its string form",
            fix="pass the id of a BulkAction", shell_fix="give the id as 'everbeat bulk list' shows it",
        ) from None  # fmt: skip


def audit_page(
    limit: int, *, most: int, **filters: Unpack[AuditFilters]
) -> Plan[tuple[list[AuditEntry], int | None]]:
    """Return a plan that lists the audit log, as `App.audit_log`. It examines at most `most` entries.

    Return the id of the last examined entry, too, if the page is not full because the search ended there.
    """
    found = yield from _entries(limit, most=most, **filters)
    if len(found) >= limit:
        return found, None
    since, before = filters.get("since"), filters.get("before")
    return found, (yield from ask(audit.last_examined(since=since, before=before, most=most)))


def _entries(
    limit: int,
    *,
    most: int | None = None,
    since: When | None = None,
    actor: str | None = None,
    action: str | None = None,
    before: int | None = None,
) -> Plan[list[AuditEntry]]:
    return ask(
        audit.entries(
            since=None if since is None else to_past(since, subject="since"),
            actor=sought_or_none(actor, subject="actor"),
            action=None if action is None else _audited(action, subject="action"),
            before=None if before is None else _number(before, subject="before"),
            limit=_limit(limit, subject="audit_log.limit"),
            most=most,
        )
    )
