"""`everbeat check`: imports the app's module, collects all mistakes, and finds functions that were never registered."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import typer
from msgspec import Struct, field
from msgspec.structs import replace

from everbeat import assembly
from everbeat.app import App, definition_of
from everbeat.cli.failures import ExitCode
from everbeat.cli.locate import app_of, apps_of, load, place_of
from everbeat.cli.output import say, show_json, stdout_console, stdout_is_terminal
from everbeat.cli.selection import JsonOption, LocatorArgument
from everbeat.cli.streams import hanging, user_output_to_stderr
from everbeat.client.database_access import database_of
from everbeat.domain.doctor.findings import CheckCode, CheckVerdict
from everbeat.domain.doctor.nats import NatsTrouble
from everbeat.domain.settings.settings import Mistake, gathering
from everbeat.domain.task.definition import TaskDefinition
from everbeat.errors import (
    ConfigurationError,
    EmbeddedUnavailable,
    EverbeatError,
    ImportFailed,
    NatsNotInstalled,
    RegistrationError,
    SchemaGone,
    SchemaMissing,
    SchemaOutdated,
)
from everbeat.errors.wording import amount, nearest, some
from everbeat.examination import Examination
from everbeat.nats.options import NatsConfig
from everbeat.store.migrations import require_fit


class Finding(Struct, frozen=True, kw_only=True):
    """One mistake or one warning. `where` is its location as `file:line`, if known."""

    code: str
    message: str
    fix: str | None = None
    where: str | None = None

    def lines(self, severity: str, *, width: int | None) -> list[str]:
        """Return the lines to print, wrapped to `width` columns on a terminal, or unwrapped if `width` is None."""
        place = "" if self.where is None else f"{_short(self.where)}: "
        lines = hanging(f"{place}{severity}: ", self.message, width=width, margin=4)
        return lines if self.fix is None else lines + hanging("    fix: ", self.fix, width=width)


def findings_of(mistakes: list[Mistake]) -> list[Finding]:
    """Return the findings for the collected mistakes, without duplicates, in source order."""
    found = [finding for mistake in mistakes for finding in of_error(mistake.error, where=mistake.where)]
    return list(dict.fromkeys(found))


def of_error(error: EverbeatError, *, where: str | None) -> Iterator[Finding]:
    """Yield the findings for one error. `where` is the location to use if the error has none."""
    match error:
        case ConfigurationError(problems=problems):
            for problem in problems:
                yield Finding(
                    code=problem.code,
                    message=f"{problem.subject} = {problem.value}: {problem.rule}.",
                    fix=f"{problem.fix}.",
                    where=problem.where or where,
                )
        case RegistrationError() | ImportFailed():
            message = error.message.removeprefix(f"{error.where}: ").rstrip()
            yield Finding(code=error.code, message=message, fix=error.fix, where=error.where or where)
        case _:
            yield Finding(code=error.code, message=error.message, fix=error.fix, where=where)


def _short(where: str) -> str:
    """Return the location relative to the working directory if the file is inside it, else unchanged."""
    here = f"{Path.cwd()}/"
    return where.removeprefix(here)


class _Place(Struct, frozen=True, kw_only=True):
    """The context of a statement: whether it is under a main guard, its enclosing function and that function's local names."""

    guarded: bool = False
    function: str | None = None
    local: frozenset[str] = frozenset()


def unregistered(apps: Collection[App], *, registered: Collection[str]) -> Iterator[Finding]:
    """Yield findings for task functions under `if __name__ == "__main__"` or in a function that was never called.

    `registered` contains the `file:line` locations of registered tasks.
    """
    for module in [*sys.modules.values()]:
        names = {
            name
            for name, value in [*getattr(module, "__dict__", {}).items()]
            if any(value is app for app in apps)
        }
        if names:
            yield from _unregistered_in(module, names, registered)


def _unregistered_in(
    module: ModuleType, names: Collection[str], registered: Collection[str]
) -> Iterator[Finding]:
    path = getattr(module, "__file__", None)
    if path is None:
        return
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - ast decodes the bytes by their coding line
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError):
        return  # compiled or generated code has no source file
    for function, decorator, place in _decorated(tree.body, _Place()):
        name = _app_name(decorator)
        where = f"{path}:{function.decorator_list[0].lineno}"
        if name not in names or name in place.local or where in registered:
            continue
        reason = (
            'it is under `if __name__ == "__main__"`'
            if place.guarded
            else f"it is inside function {place.function!r}, which the import does not call"
        )
        yield Finding(
            code="NEVER_REGISTERED",
            message=f"Workers cannot run function {function.name!r}: importing {module.__name__!r} does not reach its "
            f"decorator, because {reason}.",
            fix="move it to the top level of the module.",
            where=where,
        )


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _decorated(statements: list[ast.stmt], place: _Place) -> Iterator[tuple[_Function, ast.expr, _Place]]:
    """Yield each decorated function whose definition an import does not execute, once with each of its decorators."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if place.guarded or place.function is not None:
                    for decorator in statement.decorator_list:
                        yield statement, decorator, place
                inner = replace(place, function=statement.name, local=place.local | _local_names(statement))
                yield from _decorated(statement.body, inner)
            case ast.If(test=test) if _is_main_guard(test):
                yield from _decorated(statement.body, replace(place, guarded=True))
                yield from _decorated(statement.orelse, place)
            case _:
                for field in ("body", "orelse", "finalbody"):
                    yield from _decorated(getattr(statement, field, []), place)


def _app_name(decorator: ast.expr) -> str | None:
    """Return `app` for `@app.task` and `@app.task(...)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    match called:
        case ast.Attribute(value=ast.Name(id=name), attr="task"):
            return name
        case _:
            return None


def _is_main_guard(test: ast.expr) -> bool:
    match test:
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]
        ):
            return True
        case ast.Compare(
            left=ast.Constant("__main__"), ops=[ast.Eq()], comparators=[ast.Name(id="__name__")]
        ):
            return True
        case _:
            return False


def _local_names(function: _Function) -> frozenset[str]:
    """Return the names that the function binds. A local variable with the name of a global app is a different object."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    assigned = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return frozenset(arguments | assigned)


commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_WRITING: Final = {CheckCode.DATABASE, CheckCode.SCHEMA, CheckCode.RIGHTS}
"""The first checks of an examination, which determine whether the app can write."""


class CheckReport(Struct):
    """The result of a check. `apps` maps the names in the module to their apps."""

    locator: str
    problems: list[Finding] = []
    warnings: list[Finding] = []
    apps: dict[str, App] = field(default_factory=dict)

    @property
    def tasks(self) -> list[TaskDefinition]:
        """Return all registered tasks of all apps."""
        return [task for app in self.apps.values() for task in app.tasks.values()]


@commands.command()
def check(
    locator: LocatorArgument,
    *,
    live: Annotated[bool, typer.Option("--live", help="Also check the database of the app.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Report every mistake in an app's settings and tasks, with file and line.

    It reports wrong settings, functions that cannot be tasks, duplicate names, and functions that a worker would never
    see. The exit code is 1 for mistakes, and 0 for warnings alone.
    """
    report = CheckReport(locator)
    with user_output_to_stderr():
        module = _import(report)
    if module is not None:
        _inspect(report, module)
        if live and not report.problems:
            _ask_databases(report)
    _show(report, as_json=as_json)
    if report.problems:
        raise typer.Exit(ExitCode.FAILED)


def _import(report: CheckReport) -> ModuleType | None:
    """Import the module, if possible to its end. Raises AppNotFound if the module does not exist."""
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


def _inspect(report: CheckReport, module: ModuleType) -> None:
    report.apps = _distinct(apps_of(module))
    if not report.problems:
        located = app_of(module, report.locator)
        if not any(app is located for app in report.apps.values()):
            report.apps[report.locator] = located
    report.problems += _names_taken_twice(report.apps)
    report.problems += unregistered(report.apps.values(), registered={task.where for task in report.tasks})
    report.warnings += _warnings(report.apps)


def _distinct(apps: dict[str, App]) -> dict[str, App]:
    """Return the apps without duplicates, each under its first name."""
    return {next(name for name, other in apps.items() if other is app): app for app in apps.values()}


def _names_taken_twice(apps: dict[str, App]) -> Iterator[Finding]:
    """Yield findings for tasks with the same name in two apps that share a schema. Each app's workers would run the other app's tasks."""
    taken: dict[tuple[str, str, str], tuple[str, TaskDefinition]] = {}
    for app_name, app in apps.items():
        for task in app.tasks.values():
            place = (database_of(app).address.portable, app.schema, task.name)
            first_app, first = taken.setdefault(place, (app_name, task))
            if first_app != app_name:
                yield Finding(
                    code="TASK_NAME_SHARED",
                    message=f"Task {task.name!r} of {app_name!r} is also a task of {first_app!r} ({first.where}). Both apps "
                    f"use schema {app.schema!r} of the same database, so the workers of each would run both tasks.",
                    fix="rename one, or give one app another schema: App(schema=...).",
                    where=task.where,
                )


def _warnings(apps: dict[str, App]) -> Iterator[Finding]:
    for name, app in apps.items():
        of_retry = [] if app.default_retry is None else app.default_retry.warnings()
        for text in (*app.recovery.warnings(), *app.worker.warnings(), *of_retry):
            yield Finding(code="UNUSUAL", message=f"App {name!r}: {text}")
        if not app.tasks:
            yield Finding(
                code="NO_TASKS", message=f"App {name!r} has no tasks.", fix="decorate a function: @app.task."
            )
        yield from _middleware_that_skips(name, app)
        hooked = definition_of(app).hooks.scopes.tasks
        for unknown in sorted(set(hooked) - set(app.tasks)):
            guess = nearest(unknown, app.tasks)
            yield Finding(
                code="HOOK_OF_NO_TASK",
                message=f"App {name!r}: on_recovery(task={unknown!r}) names a task that this app does not have.",
                fix=f"did you mean {guess!r}?"
                if guess
                else "name a task of this app, or omit task to apply it to all of them.",
            )
        for task in app.tasks.values():
            for text in task.options.warnings(default_retry=app.default_retry):
                yield Finding(code="UNUSUAL", message=f"Task {task.name!r}: {text}", where=task.where)
            if (several := task.options.several_policies(on_crash=app.on_crash)) is not None:
                text, fix = several
                message = f"Task {task.name!r}: {text}."
                yield Finding(code="SEVERAL_POLICIES", message=message, fix=fix, where=task.where)
            if (outlasts := task.options.outlasts(app.worker.grace_s)) is not None:
                yield Finding(
                    code="OUTLASTS_GRACE",
                    message=f"Task {task.name!r}: {outlasts}, and on_crash='fail' forbids a second run. A deploy can end it FAILED "
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


def _middleware_that_skips(name: str, app: App) -> Iterator[Finding]:
    """Yield findings for async middleware, which does not run around the sync tasks of the app."""
    skipped = [task.name for task in app.tasks.values() if not task.is_async]
    for each in definition_of(app).middleware.around_run if skipped else ():
        if each.is_async:
            yield Finding(
                code="MIDDLEWARE_SKIPS",
                message=f"App {name!r}: middleware {each.name!r} is async, so it does not run around {amount(len(skipped), 'sync task')}: "
                f"{some(skipped, limit=3)}.",
                fix="write it as a sync generator function, which runs around every task, or make the tasks async.",
                where=each.where or None,
            )


def _ask_databases(report: CheckReport) -> None:
    for name, app in report.apps.items():
        try:
            database_of(app).address.require_there()
        except (
            EmbeddedUnavailable
        ) as error:  # the server is created when it is first used; a check must not create it
            (report.warnings if app.auto_migrate else report.problems).extend(of_error(error, where=None))
        else:
            _ask_database(report, name, app)
        if app.nats is not None:
            _ask_nats(report, name, app, app.nats)


def _ask_database(report: CheckReport, name: str, app: App) -> None:
    try:
        try:
            found = app.schema_status()
            require_fit(found, database_of(app).target)
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


def _makes_it_fit(app: App, error: SchemaMissing | SchemaOutdated) -> bool:
    """Return whether the app will create or upgrade the schema when it first uses the database."""
    if isinstance(error, SchemaMissing):
        return bool(app.auto_migrate)
    return database_of(app).address.upgrades(app.auto_migrate)


def _unusable(name: str, app: App) -> Iterator[Finding]:
    """Yield findings for why workers and senders cannot write: a read-only server, or missing privileges."""
    for check in Examination(app, long_transaction_s=0).checks():
        if check.code not in _WRITING:
            return
        if check.verdict is not CheckVerdict.OK:
            yield Finding(code=check.code, message=f"App {name!r}: {check.text}.", fix=check.fix)


def _ask_nats(report: CheckReport, name: str, app: App, nats: NatsConfig) -> None:
    try:
        found = assembly.inspect_nats(app.schema, nats, app.recovery)
    except NatsNotInstalled as error:
        report.problems += of_error(error, where=None)
        return
    if isinstance(found, NatsTrouble):
        report.problems.append(Finding(code="NATS", message=found.text, fix=found.fix))
    else:
        say(f"{name}: NATS answers at {found.server}.")


def _show(report: CheckReport, *, as_json: bool) -> None:
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
    width = stdout_console().width if stdout_is_terminal() else None
    for severity, findings in (("error", report.problems), ("warning", report.warnings)):
        for finding in findings:
            print("\n".join(finding.lines(severity, width=width)))
    counted = f"{amount(len(report.apps), 'app')}, {amount(len(report.tasks), 'task')}"
    if report.problems:
        problems = f"{amount(len(report.problems), 'error')} and {amount(len(report.warnings), 'warning')}"
        say(f"{report.locator}: {problems} ({counted}).")
    else:
        say(f"{report.locator} has no errors: {counted}, {amount(len(report.warnings), 'warning')}.")
