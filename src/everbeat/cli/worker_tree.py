"""The command `everbeat worker` without the command-line parser, which would fill the supervisor's memory and delay its start.

This module understands a correct command line without --help or --reload. It leaves all others to the parser, which reports mistakes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Final

from msgspec import Struct

from everbeat import __version__
from everbeat.assembly.tree import supervise
from everbeat.cli.json_stderr import stderr_as_json
from everbeat.cli.logs import (
    FORMAT_VARIABLE,
    LOG_LEVEL_VARIABLE,
    is_json,
    log_warnings_and_exceptions,
    show_logs,
)
from everbeat.cli.streams import guarded_streams
from everbeat.config import WorkerConfig
from everbeat.errors import ConfigurationError, EverbeatError
from everbeat.runtime.inherited import correct_inherited

SLOT_VARIABLE: Final = "EVERBEAT_SLOT"
LOG_FORMATS: Final = ("text", "json")
_COMPLETION_VARIABLE: Final = "_EVERBEAT_COMPLETE"

NUMBERS: Final = {
    "--processes": "processes",
    "--concurrency": "async_concurrency",
    "--threads": "thread_concurrency",
    "--task-processes": "process_concurrency",
    "--prefetch": "prefetch",
    "--max-tasks-per-process": "max_tasks_per_process",
}
"""The options with a whole number. Each is mapped to its setting in `WorkerConfig`."""
TEXTS: Final = {
    "--grace": "grace",
    "--poll": "poll_interval",
    "--slot": "slot",
    "--max-rss": "max_rss",
    "--capture-logs": "capture_logs",
}
"""The options with a text. Each is mapped to its setting in `WorkerConfig`."""
PROBES: Final = {"--probe": "probe", "--probe-file": "probe_file"}
"""The options of probes. Each is mapped to its field in `WorkerCall`."""
_QUEUES: Final = ("--queues", "--queue")
_LOGS: Final = ("--log-level", "--log-format")


class WorkerCall(Struct, frozen=True, kw_only=True):
    """The checked arguments of `everbeat worker`."""

    locator: str
    overrides: dict[str, Any]
    log_level: str = "info"
    log_format: str = "text"
    probe: str | None = None
    probe_file: str | None = None

    def share_log_options(self) -> int:
        """Let the processes of the tree inherit the level and the format of the logs. Return the level as a number."""
        os.environ[LOG_LEVEL_VARIABLE], os.environ[FORMAT_VARIABLE] = self.log_level, self.log_format
        return logging.getLevelNamesMapping()[self.log_level.upper()]

    def run(self) -> None:
        """Supervise the workers until a signal stops them."""
        level = self.share_log_options()
        with stderr_as_json() if is_json() else nullcontext():
            show_logs(level)
            supervise(
                self.locator,
                overrides=self.overrides,
                probe=self.probe,
                probe_file=self.probe_file,
                version=__version__,
            )


def call_of(arguments: Sequence[str], environment: Mapping[str, str]) -> WorkerCall | None:
    """Return the call that the arguments after `worker` describe, or None if the command-line parser must read them."""
    found = None if _COMPLETION_VARIABLE in environment else _split(arguments)
    if found is None:
        return None
    locator, options, queues = found
    level = options.pop("--log-level", environment.get(LOG_LEVEL_VARIABLE) or "info")
    form = options.pop("--log-format", environment.get(FORMAT_VARIABLE) or "text")
    if level.upper() not in logging.getLevelNamesMapping() or form.lower() not in LOG_FORMATS:
        return None
    if slot := environment.get(SLOT_VARIABLE):
        options.setdefault("--slot", slot)
    probes = {name: options.pop(option) for option, name in PROBES.items() if option in options}
    overrides: dict[str, Any] = {"queues": queues} if queues else {}
    for option, text in options.items():
        if option in TEXTS:
            overrides[TEXTS[option]] = text
        elif text.isascii() and text.isdecimal():
            overrides[NUMBERS[option]] = int(text)
        else:
            return None
    try:
        WorkerConfig(**overrides)
    except ConfigurationError:
        return None
    return WorkerCall(locator=locator, overrides=overrides, log_level=level, log_format=form, **probes)


def _split(arguments: Sequence[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """Return the locator, the options and the queues, or None if an argument is missing or unknown."""
    locators: list[str] = []
    options: dict[str, str] = {}
    queues: list[str] = []
    rest = iter(arguments)
    for each in rest:
        if not each.startswith("-"):
            locators.append(each)
            continue
        option, is_joined, value = each.partition("=")
        if not is_joined:
            value = next(rest, "")
        if not value or value.startswith("-"):
            return None
        if option in _QUEUES:
            queues += names_in(value)
        elif option in NUMBERS or option in TEXTS or option in PROBES or option in _LOGS:
            options[option] = value
        else:
            return None
    return (locators[0], options, queues) if len(locators) == 1 and locators[0] else None


def names_in(text: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main(arguments: Sequence[str]) -> None:
    """Run `everbeat worker` with these arguments, of which the first is `worker`, and exit with an `ExitCode`."""
    call = call_of(arguments[1:], os.environ)
    if call is None:
        import_module("everbeat.cli.main").main(arguments)
        return
    correct_inherited()
    with guarded_streams():
        if call.log_format.lower() == "json":
            log_warnings_and_exceptions()
        try:
            call.run()
        except (EverbeatError, KeyboardInterrupt) as problem:
            import_module("everbeat.cli.main").fail(problem, arguments)
