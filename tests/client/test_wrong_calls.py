"""Test that a wrong call of a public function names the function, the argument, the nearest name and the place."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
from collections.abc import Callable, Iterator
from copy import copy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FunctionType
from typing import Any
from uuid import uuid4

import pytest

import everbeat
from everbeat import (
    App,
    BulkAction,
    Context,
    NatsConfig,
    QueueConfig,
    RecoveryConfig,
    RetryPolicy,
    Schedule,
    TaskError,
    WorkerConfig,
    Workflow,
)
from everbeat.client.task import local_context
from everbeat.domain.bulk_actions import BulkActionInfo, BulkState, BulkVerb
from everbeat.domain.settings.settings import gathering
from everbeat.errors import ConfigurationError
from everbeat.recovery import Reschedule

URL = "postgresql://localhost/never-opened"
app = App(URL)


@app.task
def pack(order: int, note: str = "") -> str:
    return f"{order} {note}"


@app.define_workflow("order")
def order_of(wf: Workflow, order: int) -> None:
    wf.add(pack, order)


wf = app.workflow("by-hand")
context = local_context(task_id=uuid4(), name="pack", queue="default")
OBJECTS: list[Any] = [
    app,
    pack,
    order_of,
    wf,
    wf.add(pack, 1),
    wf.map(pack, [1, 2]),
    wf.call(),
    app.handle(uuid4()),
    app.workflow_handle(uuid4()),
    context,
    context.named("ship"),
    Schedule("hourly", pack.call(1), every="1h"),
    app.batch("import"),
    BulkAction(
        BulkActionInfo(
            id=uuid4(),
            action=BulkVerb.RETRY,
            filters={},
            parameters={},
            state=BulkState.RUNNING,
            requested_by="ann",
            origin="python",
            requested_at=datetime.now(UTC),
        ),
        database=app._database,
    ),
]
MISSPELT: list[tuple[str, Callable[[], Any], str]] = [
    ("App.stall_timout", lambda: App(URL, stall_timout="5m"), "use stall_timeout"),  # type: ignore[call-arg]
    (
        "App.max_crashes",
        lambda: App(URL, max_crashes=3),
        "write App(recovery=RecoveryConfig(max_crashes=...))",
    ),  # type: ignore[call-arg]
    ("App.processes", lambda: App(URL, processes=4), "write App(worker=WorkerConfig(processes=...))"),  # type: ignore[call-arg]
    ("RecoveryConfig.max_crash", lambda: RecoveryConfig(max_crash=3), "use max_crashes"),  # type: ignore[call-arg]
    ("WorkerConfig.proceses", lambda: WorkerConfig(proceses=3), "use processes"),  # type: ignore[call-arg]
    ("QueueConfig.prioriti", lambda: QueueConfig("mail", prioriti=3), "use priority"),  # type: ignore[call-arg]
    ("NatsConfig.ackwait", lambda: NatsConfig(servers=["nats://a"], ackwait=3), "use ack_wait"),  # type: ignore[call-arg]
    ("RetryPolicy.max_retrys", lambda: RetryPolicy(max_retrys=3), "use max_retries"),  # type: ignore[call-arg]
    ("Reschedule.attemts", lambda: Reschedule(timedelta(1), attemts=0), "use attempts"),  # type: ignore[call-arg]
    ("TaskError.mesage", lambda: TaskError("CODE", mesage="text"), "use message"),  # type: ignore[call-arg]
    ("TaskOptions.quue", lambda: app.task(quue="mail"), "use queue"),  # type: ignore[call-overload]
    ("App.on_recovery.tsk", lambda: app.on_recovery(tsk="pack"), "use task"),  # type: ignore[call-overload]
    ("App.workflow.on_eror", lambda: app.workflow("order", on_eror="fail"), "use on_error"),  # type: ignore[call-arg]
    ("App.list_tasks.stat", lambda: app.list_tasks(stat="FAILED"), "use state"),  # type: ignore[call-arg]
    ("App.outcomes.timout", lambda: app.outcomes([], timout=1), "use timeout"),  # type: ignore[call-arg]
    ("WorkerConfig.quues", lambda: app.run_worker(quues=["mail"]), "use queues"),  # type: ignore[call-arg]
    ("SendSettings.quue", lambda: pack.with_options(quue="mail"), "use queue"),  # type: ignore[call-arg]
    ("SendSettings.quue", lambda: app.send_by_name("pack", {}, quue="mail"), "use queue"),  # type: ignore[call-arg]
    ("Context.with_options.retries", lambda: context.with_options(retries=3), "use retry"),  # type: ignore[call-arg]
    ("Context.wait_event.timout", lambda: context.wait_event("a", timout=3), "use timeout"),  # type: ignore[call-overload]
    ("Workflow.start.outptu", lambda: wf.start(outptu=None), "use output"),  # type: ignore[call-overload]
    ("WorkflowDefinition.with_options.kee", lambda: order_of.with_options(kee="a"), "use key"),  # type: ignore[call-arg]
    (
        "Schedule.overlp",
        lambda: Schedule("hourly", pack.call(1), every="1h", overlp="skip"),  # type: ignore[call-arg]
        "use overlap",
    ),
    (
        "Schedule.overlp",
        lambda: app.schedule("hourly", pack.call(1), every="1h", overlp="skip"),  # type: ignore[call-overload]
        "use overlap",
    ),
    ("App.list_schedules.prefxi", lambda: app.list_schedules(prefxi="a"), "use prefix"),  # type: ignore[call-arg]
    ("Node.after.jon", lambda: OBJECTS[4].after(jon="any"), "use join"),
]


@pytest.mark.parametrize(("subject", "call", "fix"), MISSPELT, ids=[each[0] for each in MISSPELT])
def test_a_misspelt_argument_is_refused_with_the_nearest_name_and_the_place(
    subject: str, call: Callable[[], Any], fix: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        call()
    (problem,) = refusal.value.problems
    assert (problem.code, problem.subject, problem.fix) == ("UNKNOWN_NAME", subject, fix)
    assert problem.where is not None
    assert problem.where.startswith(f"{__file__}:")


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for each in OBJECTS:
        kind = type(each)
        for name in dir(kind):
            function = inspect.getattr_static(kind, name)
            if name.startswith("_") or name == "entered" or not isinstance(function, FunctionType):
                continue
            parameters = inspect.signature(function).parameters.values()
            if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                yield f"{kind.__name__}.{name}", getattr(each, name)


METHODS = dict(methods())


@pytest.mark.parametrize("title", METHODS)
def test_every_public_method_refuses_an_unknown_argument_under_its_public_name(title: str) -> None:
    async def awaited() -> None:
        await METHODS[title](no_such_name=1)

    is_async = inspect.iscoroutinefunction(METHODS[title])
    with pytest.raises(ConfigurationError) as refusal:
        asyncio.run(awaited()) if is_async else METHODS[title](no_such_name=1)
    (problem,) = refusal.value.problems
    public_title = title.replace("SyncTask", "Task")
    assert (problem.subject, problem.value) == (f"{public_title}.no_such_name", "1")


def test_the_methods_of_all_public_classes_are_called() -> None:
    called = {type(each).__name__ for each in OBJECTS} | {
        "Task",
        "AsyncTask",
    }  # both have the methods of SyncTask
    without_arguments = {
        "Call",
        "EventTimeout",
        "NonDeterministic",
    }  # users do not make these, and only read them
    data = {
        name
        for name in everbeat.__all__
        if inspect.isclass(kind := getattr(everbeat, name))
        and (
            hasattr(kind, "__struct_fields__")
            or hasattr(kind, "__dataclass_fields__")
            or issubclass(kind, str)
        )
    }
    errors = {
        name
        for name in everbeat.__all__
        if inspect.isclass(kind := getattr(everbeat, name)) and issubclass(kind, BaseException)
    }
    others = {name for name in everbeat.__all__ if inspect.isclass(getattr(everbeat, name))}
    assert others - called - data - errors - without_arguments == set()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (context.wait_event, "Context.wait_event() missing 1 required positional argument: 'name'"),
        (context.step, "Context.step() missing 1 required positional argument: 'fn'"),
        (lambda: context.sleep("1s", "2s"), "Context.sleep() takes 2 positional arguments but 3 were given"),
        (app.send_many, "App.send_many() missing 1 required positional argument: 'calls'"),
        (app.schedule, "App.schedule() missing 1 required positional argument: 'name'"),
        (lambda: Schedule("a"), "Schedule() missing 1 required positional argument: 'call'"),  # type: ignore[call-arg]
        (app.cancel, "App.cancel() missing 1 required positional argument: 'task_id'"),
        (lambda: App(URL, "schema"), "App() takes from 1 to 2 positional arguments but 3 were given"),
    ],
)
def test_other_wrong_calls_raise_type_errors_that_name_the_public_class(
    call: Callable[[], Any], says: str
) -> None:
    with pytest.raises(TypeError) as refusal:
        call()
    assert str(refusal.value) == says


def test_a_type_error_of_the_users_code_is_raised_unchanged() -> None:
    def broken(_stage: str) -> int:
        raise TypeError("mine: unexpected keyword argument")

    with pytest.raises(TypeError, match=r"^mine"):
        context.step(broken, "a")

    class Text:
        def __str__(self) -> str:
            raise TypeError("mine too")

    with pytest.raises(TypeError, match=r"^mine too$"):
        context.progress("stage", message=Text())  # type: ignore[arg-type]


def test_an_unknown_argument_never_shows_a_password() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        App(dsn="postgresql://app:hunter2@db/app", password="hunter2")  # type: ignore[call-arg]
    assert "hunter2" not in str(refusal.value)
    assert refusal.value.problems[0].fix == "use url"
    with pytest.raises(ConfigurationError) as refusal:
        NatsConfig(server=["nats://app:hunter2@nats"])  # type: ignore[call-arg]
    assert "hunter2" not in str(refusal.value)


def test_a_program_check_reports_an_unknown_argument_and_continues() -> None:
    with gathering() as mistakes:
        made = App(URL, stall_timout="5m", name="shop")  # type: ignore[call-arg]
    assert made.name == "shop"
    assert [mistake.error.code for mistake in mistakes] == ["CONFIGURATION_INVALID"]


def test_public_functions_keep_their_signatures() -> None:
    assert "stall_timeout" in inspect.signature(App).parameters
    assert "stall_timeout: " in pydoc.render_doc(App, renderer=pydoc.plaintext)
    assert list(inspect.signature(Context.with_options).parameters) == ["self", "name", "retry", "timeout"]
    assert inspect.iscoroutinefunction(type(OBJECTS[7]).aresult)
    assert app._module == __name__
    assert copy(TaskError("CODE", "text", 1)) == TaskError("CODE", "text", 1)


def test_an_app_made_by_a_subclass_knows_the_module_of_its_caller() -> None:
    class Shop(App):
        def __init__(self) -> None:
            super().__init__(URL)

    assert Shop()._module == __name__
    assert Path(__file__).stem in __name__


def test_a_switch_of_a_call_must_be_true_or_false() -> None:
    handle = app.workflow_handle(uuid4())
    text: Any = "no"
    calls: dict[str, Callable[[], object]] = {
        "retry.dry_run": lambda: handle.retry(dry_run=text),
        "recover_stuck_workflows.dry_run": lambda: app.recover_stuck_workflows(dry_run=text),
        "list_workflows.children": lambda: app.list_workflows(children=text),
        "ended": lambda: app.list_workers(ended=text),
        "backfill.dry_run": lambda: app.backfill(
            "nightly",
            since=datetime(2030, 1, 1, tzinfo=UTC),
            until=datetime(2030, 1, 2, tzinfo=UTC),
            dry_run=text,
        ),
        "dry_run": lambda: app.sweep_stale_workers(dry_run=text),
    }
    for subject, call in calls.items():
        with pytest.raises(ConfigurationError, match=rf"^{subject} = 'no': must be True or False"):
            call()
    with pytest.raises(ConfigurationError, match=r"^ended = 'no'"):
        app.list_supervisors(ended=text)
