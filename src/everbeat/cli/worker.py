"""`everbeat worker`.

The supervisor that this command becomes imports no user code: its worker processes do, and tell it the settings.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Annotated, Any, Final

import typer
from msgspec.structs import replace

from everbeat.assembly.tree import supervise
from everbeat.cli.logs import LOG_LEVEL_VARIABLE, show_logs
from everbeat.config import WorkerConfig
from everbeat.errors import ConfigurationError, Problem

SLOT_VARIABLE: Final = "EVERBEAT_SLOT"

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_OPTIONS: Final = {
    "async_concurrency": "--concurrency",
    "thread_concurrency": "--threads",
    "process_concurrency": "--task-processes",
    "poll_interval": "--poll",
    "max_tasks_per_process": "--max-tasks-per-process",
    "max_rss": "--max-rss",
    "WorkerConfig": "the options",
}

_SETTING: Final = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")


@commands.command()
def worker(
    locator: Annotated[
        str,
        typer.Argument(
            metavar="LOCATOR", help="The app: package.module:app or file.py:app.", show_default=False
        ),
    ],
    *,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes.")] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queues", "--queue", metavar="NAMES", help="Serve these only: mail,films; may be repeated."
        ),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=0, help="Async tasks at once, a process.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="Tasks in threads at once, a process.")] = None,
    task_processes: Annotated[
        int | None, typer.Option(min=0, help="Tasks with run_in='process' at once, a process.")
    ] = None,
    prefetch: Annotated[int | None, typer.Option(min=0, help="Tasks to claim beyond the free slots.")] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Let running tasks finish for so long after SIGTERM."),
    ] = None,
    poll: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The longest time between two looks for work.")
    ] = None,
    slot: Annotated[
        str | None,
        typer.Option(
            envvar=SLOT_VARIABLE, metavar="NAME", help="A name that one supervisor bears at a time: web-0."
        ),
    ] = None,
    max_tasks_per_process: Annotated[
        int | None, typer.Option(min=1, help="Replace a process that has begun so many tasks.")
    ] = None,
    max_rss: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Replace a process that has grown so large: 512MB.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar=LOG_LEVEL_VARIABLE, help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run the tasks of an app until told to stop.

    Database and schema are the app's: what App(...) was given, else EVERBEAT_DATABASE_URL. What is left out here is as
    the app's WorkerConfig says. SIGTERM or Ctrl-C drains: nothing new is claimed, running tasks
    may finish, what does not is handed back. A second signal stops at once. What happens is told on stderr.
    """
    overrides = _overrides(
        processes=processes,
        queues=_names(queues),
        async_concurrency=concurrency,
        thread_concurrency=threads,
        process_concurrency=task_processes,
        prefetch=prefetch,
        grace=grace,
        poll_interval=poll,
        max_tasks_per_process=max_tasks_per_process,
        max_rss=max_rss,
        slot=slot,
    )
    _log_to_stderr(log_level)
    supervise(locator, overrides=overrides)


def _overrides(**given: Any) -> dict[str, Any]:
    overrides = {name: value for name, value in given.items() if value is not None}
    try:
        WorkerConfig(**overrides)  # refuses what is wrong before anything is started
    except ConfigurationError as error:
        raise ConfigurationError([_as_option(problem) for problem in error.problems]) from None
    return overrides


def _as_option(problem: Problem) -> Problem:
    setting = problem.subject.removeprefix("WorkerConfig.")
    fix = _SETTING.sub(lambda named: _OPTIONS[named[0]], problem.fix)
    return replace(problem, subject=_OPTIONS.get(setting, f"--{setting}"), fix=fix)


def _names(given: list[str] | None) -> list[str] | None:
    return [name.strip() for names in given for name in names.split(",") if name.strip()] if given else None


def _log_to_stderr(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"{level!r} is no --log-level: use debug, info, warning or error.")
    os.environ[LOG_LEVEL_VARIABLE] = level  # worker processes inherit it
    show_logs(number)
