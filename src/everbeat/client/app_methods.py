"""The `App` methods for tasks, workflows, pauses and supervisors."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from operator import add
from typing import Any, Final, TypeVar, overload
from uuid import UUID, uuid4

from everbeat.client.database_access import DatabaseMethods
from everbeat.client.handle import Handle, TaskOperations, outcomes_of, seen_of, to_task_id, to_workflow_id
from everbeat.client.options import key_of
from everbeat.client.question_methods import QuestionMethods
from everbeat.client.registry import Registry
from everbeat.client.sender import CallSender, ahandles_of, handles_of
from everbeat.client.task import Task
from everbeat.client.waiter import Deadline
from everbeat.client.workflow import operations as workflow_operations
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.explain.reasons import Explanation
from everbeat.domain.inspection import CancelResult, Pause, PauseKind, QuietTree, SupervisorInfo, TaskInfo
from everbeat.domain.metrics import names
from everbeat.domain.metrics.text import MetricsText, bounded
from everbeat.domain.settings.checks import (
    queue_name,
    remark,
    sequence_of,
    sought,
    sought_or_none,
    switch,
    task_name,
)
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration
from everbeat.domain.task.outcome import Completed, Failed
from everbeat.domain.workflow.states import StuckWorkflow
from everbeat.errors import NotPaused, UnknownName, WorkerEnded
from everbeat.store import inspection, retention, tasks
from everbeat.store.plan import Plan, ask
from everbeat.store.unique_tasks import task_with_key
from everbeat.store.workers import quiet

R = TypeVar("R")
HandlerT = TypeVar("HandlerT", bound=Task[..., Any])


class TaskMethods(QuestionMethods):
    """The `App` methods for individual tasks and workflows."""

    _operations: TaskOperations
    _registry: Registry
    _sender: CallSender

    @overload
    def handle(self, task_id: UUID | str, task: Task[..., R], /) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, /) -> Handle[Any]: ...
    def handle(self, task_id: UUID | str, task: Task[..., Any] | None = None, /) -> Handle[Any]:
        """Return a handle for a task that was sent earlier or by another process.

        If `task` is given, the handle decodes the result to the return type of the task function.
        """
        known = to_task_id(task_id)
        if task is None:
            return Handle(known, name=None, operations=self._operations)
        decode: Callable[[str], Any] = task._definition.codec.decode_result
        return Handle(known, name=task.name, operations=self._operations, decode=decode)

    def metrics_text(self) -> str:
        """Return the metrics of this process in the text format of Prometheus: the tasks that this app has sent here.

        Serve the text at a path of a program without workers. Nodes of workflows and ticks of schedules are not counted. A send in a
        transaction of your own counts even if it is rolled back.

        return Response(app.metrics_text(), media_type="text/plain; version=0.0.4")
        """
        found = MetricsText()
        none = {(each.options.queue, each.name): 0 for each in self._registry.values()}
        sent = none | self._sender.sent.totals()
        found.add(names.TASKS_SENT, bounded(bounded(sent, add, label=1), add))
        return found.text()

    def on_failure(self, handler: HandlerT, /) -> HandlerT:
        """Make a task the failure handler of all tasks that are registered without `on_failure`. Use this method as a decorator.

        If a task fails for good, or expires, its handler is sent with a `FinalFailure` as its only argument. A failure of the handler sends
        nothing. Raises RegistrationError or ConfigurationError if the task is unsuitable, or the app already has a default handler.

        @app.on_failure
        @app.task(queue="alerts")
        async def alert(failure: FinalFailure) -> None: ...
        """
        return self._sender.handlers.set_default(handler)

    @overload
    def find(self, task: Task[..., R], /, *, key: str) -> Handle[R] | None: ...
    @overload
    def find(self, task: str, /, *, key: str) -> Handle[Any] | None: ...
    def find(self, task: Task[..., Any] | str, /, *, key: str) -> Handle[Any] | None:
        """Return a handle for the task of this function that has the key now, or None. `task` is a task function or its name.

        The task is the one that a send with this key would find. As with `send_by_name`, a name that is not registered here is not an
        error; pass the function itself to rule out a misspelled name. Raises ConfigurationError if the name or the key is invalid.

        app.find(sync, key="user-42")
        """
        return self._run("find", self._find(task, key))

    @overload
    async def afind(self, task: Task[..., R], /, *, key: str) -> Handle[R] | None: ...
    @overload
    async def afind(self, task: str, /, *, key: str) -> Handle[Any] | None: ...
    async def afind(self, task: Task[..., Any] | str, /, *, key: str) -> Handle[Any] | None:
        """Async version of `find` that does not block the running event loop."""
        return await self._arun(self._find(task, key))

    def _find(self, task: Task[..., Any] | str, key: str) -> Plan[Handle[Any] | None]:
        known = self._registry.task(task) if isinstance(task, str) else task
        name = task_name(task if isinstance(task, str) else getattr(task, "name", task), subject="find.task")
        found = yield from ask(task_with_key(name, key_of(key, subject="find.key")))
        if found is None:
            return None
        if known is None:
            return Handle(found, name=name, operations=self._operations, existed=True)
        decode: Callable[[str], Any] = known._definition.codec.decode_result
        return Handle(found, name=name, operations=self._operations, decode=decode, existed=True)

    def outcomes(
        self, handles: Iterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[Completed[R] | Failed]:
        """Wait for all of the tasks to finish, and return their outcomes in the order of `handles`.

        If the function of a task has `ignore_result`, the value of `Completed` is None. If a result was removed after `keep_result_for`,
        the outcome is `Failed` with the code RESULT_NOT_STORED, although the task completed. Raises WaitTimeout if `timeout` expires
        first, and TaskNotFound if a task does not exist.

        app.outcomes(app.send_many(welcome.call(user) for user in users), timeout="1m")
        """
        return self._outcomes("outcomes", handles_of(handles, name="outcomes"), Deadline(timeout))

    async def aoutcomes(
        self, handles: Iterable[Handle[R]] | AsyncIterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[Completed[R] | Failed]:
        """Async version of `outcomes` that does not block the running event loop. Async iterables are also accepted."""
        return await self._aoutcomes(await ahandles_of(handles, name="aoutcomes"), Deadline(timeout))

    def results(self, handles: Iterable[Handle[R]], /, *, timeout: Duration | None = None) -> list[R]:
        """Wait for all of the tasks to finish, and return their results in the order of `handles`.

        Raises TaskFailed if a task did not complete, WaitTimeout if `timeout` expires first, and TaskNotFound if a task does not exist.
        Raises ResultNotStored if the function of a task has `ignore_result`, or its `keep_result_for` has passed. The handles then hold the
        other outcomes, so reading these sends no query. Use `outcomes` to read all of them in one call.

        app.results(app.send_many(resize.call(image) for image in images), timeout="1m")
        """
        given = handles_of(handles, name="results")
        self._outcomes("results", given, Deadline(timeout))
        return [handle.result() for handle in given]

    async def aresults(
        self, handles: Iterable[Handle[R]] | AsyncIterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[R]:
        """Async version of `results` that does not block the running event loop. Async iterables are also accepted."""
        given = await ahandles_of(handles, name="aresults")
        await self._aoutcomes(given, Deadline(timeout))
        return [await handle.aresult() for handle in given]

    def _outcomes(self, name: str, handles: list[Handle[R]], until: Deadline) -> list[Completed[R] | Failed]:
        if len(seen := seen_of(handles)) == len(handles):
            return seen
        return self._run(name, outcomes_of(handles, until=until), within_s=until.within_s)

    async def _aoutcomes(self, handles: list[Handle[R]], until: Deadline) -> list[Completed[R] | Failed]:
        if len(seen := seen_of(handles)) == len(handles):
            return seen
        return await self._arun(outcomes_of(handles, until=until), within_s=until.within_s)

    def cancel(self, task_id: UUID | str, /) -> CancelResult:
        """Cancel a task that is waiting, or ask the worker to stop a task that is running.

        Also cancels the task's children. Raises TaskNotFound if the task does not exist.
        """
        return self._run("cancel", self._operations.cancel(to_task_id(task_id)))

    async def acancel(self, task_id: UUID | str, /) -> CancelResult:
        """Async version of `cancel` that does not block the running event loop."""
        return await self._arun(self._operations.cancel(to_task_id(task_id)))

    def retry(self, task_id: UUID | str, /) -> None:
        """Requeue a FAILED, CANCELLED or EXPIRED task to run again immediately, and reset its retry and recovery budgets.

        Raises TaskNotRetryable if the task cannot be retried, and TaskNotFound if it does not exist.
        """
        self._run("retry", self._operations.retry(to_task_id(task_id)))

    async def aretry(self, task_id: UUID | str, /) -> None:
        """Async version of `retry` that does not block the running event loop."""
        await self._arun(self._operations.retry(to_task_id(task_id)))

    def info(self, task_id: UUID | str, /) -> TaskInfo:
        """Return all details of a task, including any reasons why it is still waiting. Raises TaskNotFound if the task does not exist."""
        return self._run("info", self._operations.info(to_task_id(task_id)))

    async def ainfo(self, task_id: UUID | str, /) -> TaskInfo:
        """Async version of `info` that does not block the running event loop."""
        return await self._arun(self._operations.info(to_task_id(task_id)))

    def explain(self, task_id: UUID | str, /) -> Explanation:
        """Return the reasons why a task is not running, or why it ran again. Raises TaskNotFound if the task does not exist.

        app.explain(handle.id).reasons[0].text
        """
        return self._run("explain", self._operations.explain(to_task_id(task_id)))

    async def aexplain(self, task_id: UUID | str, /) -> Explanation:
        """Async version of `explain` that does not block the running event loop."""
        return await self._arun(self._operations.explain(to_task_id(task_id)))

    def signal(
        self, target: UUID | str | Handle[Any] | WorkflowHandle[Any], name: str, value: object = None, /
    ) -> None:
        """Send a signal to a task, or to all tasks of a workflow.

        The signal wakes a task that is already waiting for it, and is stored for a task that waits for it later.

        `target` is a handle or an id. `value` must be serializable as plain JSON of at most 1 MB. Raises SignalRefused if the target has
        already finished, TaskNotFound if it does not exist, and PayloadError if `value` is invalid.

        app.signal(handle, "approved", {"by": "ann"})
        """
        self._run("signal", self._signal(target, name, value))

    async def asignal(
        self, target: UUID | str | Handle[Any] | WorkflowHandle[Any], name: str, value: object = None, /
    ) -> None:
        """Async version of `signal` that does not block the running event loop."""
        await self._arun(self._signal(target, name, value))

    def _signal(self, target: object, name: str, value: object) -> Plan[None]:
        found = getattr(target, "id", None)
        target_id = found if isinstance(found, UUID) else to_task_id(target)
        return self._operations.signal(target_id, name, value, signal_id=self._sender.ids.next())

    def workflow_handle(self, workflow_id: UUID | str, /) -> WorkflowHandle[Any]:
        """Return a handle for a workflow that was started earlier or by another process. The result is decoded as plain JSON."""
        return WorkflowHandle(to_workflow_id(workflow_id), operations=self._operations)


_ids: Final = sequence_of(sought, shortest=1, longest=10_000)
_MOST: Final = 100_000


class OperatorMethods(DatabaseMethods):
    """The `App` methods for operators. They control which tasks workers claim, and recover stuck workflows."""

    _alive_within_ms: int
    _queue_priorities: Mapping[str, int]
    _registry: Registry

    def quiet_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> list[QuietTree]:
        """Stop the workers of the selected supervisors from claiming tasks. Their current tasks and heartbeats continue.

        The workers claim no tasks until they are resumed or their supervisor exits. Select supervisors with exactly one of `ids`, `host`
        and `everyone`. The id of a worker selects its supervisor. Supervisors that start later are not affected. Returns the selected
        supervisors that are still running. Raises UnknownName or WorkerEnded, and changes nothing, if an id or the host does not match
        a live supervisor.

        app.quiet_workers(host="web-1")
        """
        plan = self._quiet("quiet_workers", ids, host=host, everyone=everyone, on=True)
        return self._run("quiet_workers", plan)

    async def aquiet_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> list[QuietTree]:
        """Async version of `quiet_workers` that does not block the running event loop."""
        return await self._arun(self._quiet("quiet_workers", ids, host=host, everyone=everyone, on=True))

    def resume_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> list[QuietTree]:
        """Let the workers of the selected supervisors claim tasks again immediately.

        Takes the same parameters and returns the same result as `quiet_workers`.
        """
        plan = self._quiet("resume_workers", ids, host=host, everyone=everyone, on=False)
        return self._run("resume_workers", plan)

    async def aresume_workers(
        self, ids: Sequence[str] = (), /, *, host: str | None = None, everyone: bool = False
    ) -> list[QuietTree]:
        """Async version of `resume_workers` that does not block the running event loop."""
        return await self._arun(self._quiet("resume_workers", ids, host=host, everyone=everyone, on=False))

    def _quiet(
        self, name: str, ids: Sequence[str], *, host: str | None, everyone: bool, on: bool
    ) -> Plan[list[QuietTree]]:
        everyone = switch(everyone, subject=f"{name}.everyone")
        if sum((bool(ids), host is not None, everyone)) != 1:
            raise refused(
                {"ids": list(ids), "host": host, "everyone": everyone},
                subject=name,
                code="CONTRADICTION",
                rule="needs exactly one of ids, host and everyone",
                fix="give ids, or host='web-1', or everyone=True",
                shell_fix="give ids, or --host web-1, or --all",
            )
        host = sought_or_none(host, subject=f"{name}.host")
        chosen: tuple[str, ...] = _ids(ids, subject=f"{name}.ids") if ids else ()
        if chosen or host is not None:
            trees = yield from ask(
                inspection.supervisors(stale_ms=self._alive_within_ms, ended_too=True, limit=_MOST)
            )
            if host is not None:
                _require_host(host, trees)
            else:
                yield from _require_live(chosen, trees)
        channel = self._database.channel
        return (yield from ask(quiet(chosen, host=host, everyone=everyone, quiet=on, channel=channel)))

    def pause_task(self, name: str, /, *, reason: str | None = None) -> Pause:
        """Stop workers from claiming tasks of the function `name` until it is resumed. Running tasks continue.

        If the function is already paused, returns the existing pause unchanged, with `already_paused` set. `reason` must consist of 1 to
        1,000 printable characters. Raises UnknownName if no function has this name.

        app.pause_task("render", reason="the renderer is being replaced")
        """
        return self._run("pause_task", self._pause("task", name, reason))

    async def apause_task(self, name: str, /, *, reason: str | None = None) -> Pause:
        """Async version of `pause_task` that does not block the running event loop."""
        return await self._arun(self._pause("task", name, reason))

    def pause_queue(self, name: str, /, *, reason: str | None = None) -> Pause:
        """Stop workers from claiming tasks from the queue `name` until it is resumed. Otherwise works like `pause_task`."""
        return self._run("pause_queue", self._pause("queue", name, reason))

    async def apause_queue(self, name: str, /, *, reason: str | None = None) -> Pause:
        """Async version of `pause_queue` that does not block the running event loop."""
        return await self._arun(self._pause("queue", name, reason))

    def resume_task(self, name: str, /) -> Pause:
        """Let workers claim tasks of the function `name` again immediately, and return the pause that was lifted.

        Raises NotPaused if the function is not paused.
        """
        return self._run("resume_task", self._resume("task", name))

    async def aresume_task(self, name: str, /) -> Pause:
        """Async version of `resume_task` that does not block the running event loop."""
        return await self._arun(self._resume("task", name))

    def resume_queue(self, name: str, /) -> Pause:
        """Let workers claim tasks from the queue `name` again immediately, and return the pause that was lifted.

        Raises NotPaused if the queue is not paused.
        """
        return self._run("resume_queue", self._resume("queue", name))

    async def aresume_queue(self, name: str, /) -> Pause:
        """Async version of `resume_queue` that does not block the running event loop."""
        return await self._arun(self._resume("queue", name))

    def pause_all(self, *, reason: str | None = None) -> Pause:
        """Stop workers from claiming any task, of any function and queue, until `resume_all`. Return the pause.

        Running code continues, and schedules still decide their ticks. Workers of older versions stop too, if they run when this method
        is called. Raises ConfigurationError if the reason is invalid.

        app.pause_all(reason="the bank is down")
        """
        return self._run("pause_all", self._pause_all(reason))

    async def apause_all(self, *, reason: str | None = None) -> Pause:
        """Async version of `pause_all` that does not block the running event loop."""
        return await self._arun(self._pause_all(reason))

    def resume_all(self) -> Pause:
        """Let workers claim tasks again immediately, and return the pause that was lifted. Other pauses of task functions and queues remain.

        Raises NotPaused if there is no pause of everything.
        """
        return self._run("resume_all", self._resume_all())

    async def aresume_all(self) -> Pause:
        """Async version of `resume_all` that does not block the running event loop."""
        return await self._arun(self._resume_all())

    def _pause_all(self, reason: str | None) -> Plan[Pause]:
        if reason is not None:
            remark(reason, subject="pause_all.reason")
        return self._all_paused(reason)

    def _all_paused(self, reason: str | None) -> Plan[Pause]:
        standing, call = None, uuid4()
        while standing is None:  # None: another operator paused or resumed at the same time
            standing = yield from ask(tasks.pause_all(paused_by="operator", reason=reason, call=call))
        return standing

    def _resume_all(self) -> Plan[Pause]:
        for pause in (yield from ask(tasks.pauses())):
            if pause.kind == "all":
                yield from ask(tasks.resume_all(pause, channel=self._database.channel))
                return pause
        raise NotPaused("all", "*")

    def list_pauses(self) -> list[Pause]:
        """Return the current pauses of task functions, of queues and of everything, newest first."""
        return self._run("list_pauses", ask(tasks.pauses()))

    async def alist_pauses(self) -> list[Pause]:
        """Async version of `list_pauses` that does not block the running event loop."""
        return await self._arun(ask(tasks.pauses()))

    def _pause(self, kind: PauseKind, name: str, reason: str | None) -> Plan[Pause]:
        (task_name if kind == "task" else queue_name)(name, subject=f"pause_{kind}.name")
        if reason is not None:
            remark(reason, subject=f"pause_{kind}.reason")
        return self._paused(kind, name, reason)

    def _paused(self, kind: PauseKind, name: str, reason: str | None) -> Plan[Pause]:
        queues = {"default", *self._queue_priorities, *self._registry.queues}
        known: Collection[str] = self._registry if kind == "task" else queues
        if name not in known:
            known = {*known, *(yield from ask(tasks.known_names(kind)))}
            if name not in known:
                raise UnknownName(kind, [name], known=known)
        standing, call = None, uuid4()
        while standing is None:  # None: another operator paused or resumed it at the same time
            standing = yield from ask(tasks.pause(kind, name, paused_by="operator", reason=reason, call=call))
        return standing

    def _resume(self, kind: PauseKind, name: str) -> Plan[Pause]:
        sought(name, subject=f"resume_{kind}.name")
        # Read the pause first. If the reply to the resume statement is lost, a retry can no longer find the pause.
        standing = {each.name: each for each in (yield from ask(tasks.pauses())) if each.kind == kind}
        if name not in standing:
            raise NotPaused(kind, name, paused=list(standing))
        yield from ask(tasks.resume(standing[name], channel=self._database.channel))
        return standing[name]

    def recover_stuck_workflows(self, *, dry_run: bool = False) -> list[StuckWorkflow]:
        """Perform the workflow steps that are more than 10 s overdue, and return them. If `dry_run` is set, only return the steps.

        Every supervisor does this periodically. Call this method if no supervisor is running, or to inspect stuck workflows.
        """
        return self._run("recover_stuck_workflows", self._recover_stuck(dry_run))

    async def arecover_stuck_workflows(self, *, dry_run: bool = False) -> list[StuckWorkflow]:
        """Async version of `recover_stuck_workflows` that does not block the running event loop."""
        return await self._arun(self._recover_stuck(dry_run))

    def _recover_stuck(self, dry_run: bool) -> Plan[list[StuckWorkflow]]:
        switch(dry_run, subject="recover_stuck_workflows.dry_run")
        return workflow_operations.recover_stuck(channel=self._database.channel, dry_run=dry_run)


def _require_live(ids: Sequence[str], trees: Sequence[SupervisorInfo]) -> Plan[None]:
    """Raise UnknownName or WorkerEnded if an id does not belong to a live supervisor or worker."""
    workers = yield from ask(retention.known_workers())
    known = {each.supervisor_id for each in trees if each.ended_at is None}
    known |= {each.id for each in workers if each.over_at is None}
    ends = {each.id: ("worker", each.over_at, each.cause) for each in workers if each.over_at is not None}
    ends |= {
        each.supervisor_id: ("supervisor", each.ended_at, each.ended_how)
        for each in trees
        if each.ended_at is not None
    }
    if unknown := [name for name in ids if name not in known and name not in ends]:
        raise UnknownName("worker", unknown, known=known, former=ends)
    if over := [name for name in ids if name not in known]:
        kind, ended_at, cause = ends[over[0]]
        raise WorkerEnded(kind, over, ended_at=ended_at, cause=cause, live=known)


def _require_host(host: str, trees: Sequence[SupervisorInfo]) -> None:
    """Raise UnknownName or WorkerEnded if no live supervisor is running on this host."""
    hosts = {each.hostname for each in trees if each.ended_at is None}
    if host in hosts:
        return
    ends = [
        (each.ended_at, each.ended_how)
        for each in trees
        if each.hostname == host and each.ended_at is not None
    ]
    if not ends:
        raise UnknownName("host", [host], known=hosts)
    ended_at, cause = max(ends, key=lambda end: end[0])
    raise WorkerEnded("the last supervisor on host", [host], ended_at=ended_at, cause=cause, live=hosts)
