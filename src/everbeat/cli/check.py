"""`everbeat check`: imports the app's module while mistakes are gathered, then looks at what came of it.

What lives here: the order of the looks and the report. What may not: the rules themselves, which are everbeat's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Annotated, Final

import typer
from msgspec import Struct, field

from everbeat import assembly
from everbeat.app import App
from everbeat.cli.examination import Examination
from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.findings import Finding, findings_of, of_error
from everbeat.cli.locate import app_of, apps_of, load, place_of
from everbeat.cli.output import say, show_json
from everbeat.cli.selection import JsonOption
from everbeat.cli.streams import own_voice
from everbeat.cli.unregistered import unregistered
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.diagnosis import CheckCode, Verdict
from everbeat.domain.gathering import gathering
from everbeat.domain.nats_checks import NatsTrouble
from everbeat.errors import (
    EverbeatError,
    ImportFailed,
    NatsNotInstalled,
    SchemaGone,
    SchemaMissing,
    SchemaOutdated,
    nearest,
)
from everbeat.store.migrations import require_fit
from everbeat.wake.options import NatsConfig

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_WRITING: Final = {CheckCode.DATABASE, CheckCode.SCHEMA, CheckCode.RIGHTS}
"""The first checks of an examination, which say whether the app can write."""


class Report(Struct):
    """What is known after a check; `apps` by their names in the module."""

    locator: str
    problems: list[Finding] = []
    warnings: list[Finding] = []
    apps: dict[str, App] = field(default_factory=dict)

    @property
    def tasks(self) -> list[TaskDefinition]:
        """All registered tasks of all apps."""
        return [task for app in self.apps.values() for task in app.tasks.values()]


@commands.command()
def check(
    locator: Annotated[
        str,
        typer.Argument(
            metavar="LOCATOR", help="The app: package.module:app or file.py:app.", show_default=False
        ),
    ],
    *,
    live: Annotated[
        bool, typer.Option("--live", help="Also ask the database whether it can be used.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report every mistake in an app's settings and tasks, with file and line.

    All of them, not only the first: wrong settings, functions that cannot be tasks, names given twice, functions that a
    worker would never see. Exit code 1 if there is a mistake; warnings alone are none.
    """
    report = Report(locator)
    with own_voice():
        module = _import(report)
    if module is not None:
        _look(report, module)
        if live and not report.problems:
            _ask_databases(report)
    _show(report, as_json=as_json)
    if report.problems:
        raise typer.Exit(ExitCode.FAILED)


def _import(report: Report) -> ModuleType | None:
    """The module, imported to its end if possible. Raises AppNotFound where there is none."""
    module = None
    with gathering() as mistakes:
        broken: list[Finding] = []
        try:
            module = load(report.locator)
        except ImportFailed as error:
            broken += of_error(error, where=None)
        except EverbeatError as error:
            if error.__traceback__ is None or (where := place_of(error)) is None:
                raise
            broken += of_error(error, where=where)
    report.problems += [*findings_of(mistakes), *broken]
    return module


def _look(report: Report, module: ModuleType) -> None:
    report.apps = _distinct(apps_of(module))
    if not report.problems:
        located = app_of(module, report.locator)
        if not any(app is located for app in report.apps.values()):
            report.apps[report.locator] = located
    report.problems += _names_taken_twice(report.apps)
    report.problems += unregistered(report.apps.values(), registered={task.where for task in report.tasks})
    report.warnings += _warnings(report.apps)


def _distinct(apps: dict[str, App]) -> dict[str, App]:
    """Each app once, under its first name."""
    return {next(name for name, other in apps.items() if other is app): app for app in apps.values()}


def _names_taken_twice(apps: dict[str, App]) -> Iterator[Finding]:
    """Tasks of one name in two apps that share a schema: workers of both would take each other's."""
    taken: dict[tuple[str, str, str], tuple[str, TaskDefinition]] = {}
    for app_name, app in apps.items():
        for task in app.tasks.values():
            place = (app.door.address.portable, app.schema, task.name)
            first_app, first = taken.setdefault(place, (app_name, task))
            if first_app != app_name:
                yield Finding(
                    code="TASK_NAME_SHARED",
                    message=f"Task {task.name!r} of {app_name!r} is also a task of {first_app!r} ({first.where}), and both apps "
                    f"keep their tasks in schema {app.schema!r} of the same database: either's worker would run both.",
                    fix="rename one, or give one app a schema of its own: App(schema=...).",
                    where=task.where,
                )


def _warnings(apps: dict[str, App]) -> Iterator[Finding]:
    for name, app in apps.items():
        for text in (*app.recovery.warnings(), *app.worker.warnings()):
            yield Finding(code="UNUSUAL", message=f"App {name!r}: {text}")
        if not app.tasks:
            yield Finding(
                code="NO_TASKS", message=f"App {name!r} has no tasks.", fix="decorate a function: @app.task."
            )
        hooked = app.blueprint().hooks.scopes.tasks
        for unknown in sorted(set(hooked) - set(app.tasks)):
            guess = nearest(unknown, app.tasks)
            yield Finding(
                code="HOOK_OF_NO_TASK",
                message=f"App {name!r}: on_recovery(task={unknown!r}) decides about no task of this app.",
                fix=f"did you mean {guess!r}?"
                if guess
                else "name a task of this app, or leave task out for all of them.",
            )
        for task in app.tasks.values():
            for text in task.options.warnings():
                yield Finding(code="UNUSUAL", message=f"Task {task.name!r}: {text}", where=task.where)
            if (several := task.options.several_policies(on_crash=app.on_crash)) is not None:
                text, fix = several
                message = f"Task {task.name!r}: {text}."
                yield Finding(code="SEVERAL_POLICIES", message=message, fix=fix, where=task.where)
            if (outlasts := task.options.outlasts(app.worker.grace_s)) is not None:
                yield Finding(
                    code="OUTLASTS_GRACE",
                    message=f"Task {task.name!r}: {outlasts}, and on_crash='fail' forbids a second run: a deploy can end it FAILED "
                    "with WORKER_STOPPED.",
                    fix="give it a timeout shorter than the grace, or allow a second run after a stop: on_stop='retry'.",
                    where=task.where,
                )
            served = app.worker.queues
            if served is not None and task.options.queue not in served:
                yield Finding(
                    code="QUEUE_NOT_SERVED",
                    message=f"Task {task.name!r} goes to queue {task.options.queue!r}, which the workers of app {name!r} do not "
                    f"serve: {', '.join(served)}.",
                    fix="run other workers for it (everbeat worker --queues), or add it to WorkerConfig(queues=...).",
                    where=task.where,
                )


def _ask_databases(report: Report) -> None:
    for name, app in report.apps.items():
        try:
            try:
                found = app.schema_status()
                require_fit(found, app.door.target)
                unusable = list(_unusable(name, app))
            finally:
                app.close()
        except SchemaGone as error:
            report.problems += of_error(error, where=None)
        except (SchemaMissing, SchemaOutdated) as error:
            report_to = report.warnings if _makes_it_fit(app, error) else report.problems
            report_to += of_error(error, where=None)
        except EverbeatError as error:
            report.problems += of_error(error, where=None)
        else:
            report.problems += unusable
            say(f"{name}: the database answers, and {found.summary}.")
        if app.nats is not None:
            _ask_nats(report, name, app, app.nats)


def _makes_it_fit(app: App, error: SchemaMissing | SchemaOutdated) -> bool:
    """Whether the first use of the app does what the error asks for."""
    if isinstance(error, SchemaMissing):
        return bool(app.auto_migrate)
    return app.door.address.upgrades(app.auto_migrate)


def _unusable(name: str, app: App) -> Iterator[Finding]:
    """What keeps workers and senders with this URL from writing: the server is read-only, or rights are missing."""
    for check in Examination(app, long_transaction_s=0).checks():
        if check.code not in _WRITING:
            return
        if check.verdict is not Verdict.OK:
            yield Finding(code=check.code, message=f"App {name!r}: {check.text}.", fix=check.fix)


def _ask_nats(report: Report, name: str, app: App, nats: NatsConfig) -> None:
    try:
        found = assembly.look_at_nats(app.schema, nats, app.recovery)
    except NatsNotInstalled as error:
        report.problems += of_error(error, where=None)
        return
    if isinstance(found, NatsTrouble):
        report.problems.append(Finding(code="NATS", message=found.text, fix=found.fix))
    else:
        say(f"{name}: NATS answers at {found.server}.")


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "ok": not report.problems,
                "locator": report.locator,
                "problems": report.problems,
                "warnings": report.warnings,
                "apps": [
                    {"name": name, "schema": app.schema, "tasks": list(app.tasks)}
                    for name, app in report.apps.items()
                ],
            }
        )
        return
    for severity, findings in (("error", report.problems), ("warning", report.warnings)):
        for finding in findings:
            print(finding.lines(severity))
    counted = f"{_counted(report.apps, 'app')}, {_counted(report.tasks, 'task')}"
    if report.problems:
        said = f"{_counted(report.problems, 'error')} and {_counted(report.warnings, 'warning')}"
        say(f"{report.locator}: {said} ({counted}).")
    else:
        say(f"{report.locator} is sound: {counted}, {_counted(report.warnings, 'warning')}.")


def _counted(things: Iterable[object], name: str) -> str:
    number = len(list(things))
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
