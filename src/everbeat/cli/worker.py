"""`everbeat worker`: runs workers, restarts them when code changes, and writes their stderr as JSON lines."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec.structs import replace

from everbeat.cli.logs import FORMAT_VARIABLE, LOG_LEVEL_VARIABLE, show_logs
from everbeat.cli.own_tree import start_own_tree
from everbeat.cli.selection import LocatorArgument
from everbeat.cli.worker_tree import LOG_FORMATS, SLOT_VARIABLE, WorkerCall, names_in
from everbeat.config import WorkerConfig
from everbeat.errors import ConfigurationError, Problem
from everbeat.errors.wording import some
from everbeat.runtime.main_loop import take_signal

GRACE: Final = "2s"
"""The grace period for running tasks during a reload, unless --grace is given."""
_EVERY_S: Final = 0.25
_IGNORED: Final = {"__pycache__", "node_modules", "site-packages"}
_VIRTUAL: Final = "pyvenv.cfg"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AT_ONCE_S: Final = 10.0
_MOST_NAMES: Final = 3

_log = logging.getLogger("everbeat.reload")

Seen = Mapping[str, tuple[int, int]]
"""The modification time and size of each file."""


def checked_folders(given: Sequence[str] | None, *, reload: bool) -> list[Path]:
    """Return the folders to watch: the given folders, else the current one, or none without --reload. Raises typer.BadParameter."""
    if not reload:
        if given:
            raise typer.BadParameter("--reload-dir needs --reload: it names a folder to watch.")
        return []
    folders = [Path(each) for each in given or ["."]]
    for folder in folders:
        if not folder.is_dir():
            raise typer.BadParameter(f"--reload-dir {str(folder)!r} is not a folder.")
    return folders


def run_reloading(locator: str, *, options: Sequence[str], folders: Sequence[Path]) -> None:
    """Run a tree of workers until SIGINT, SIGTERM or SIGHUP, and restart it when a Python file changes.

    Must be called in the main thread.
    """
    reloader = _Reloader(locator, options=options, folders=folders)
    for number in _SIGNALS:
        take_signal(number, reloader.stop)
    reloader.run()


def seen_in(folders: Sequence[Path]) -> Seen:
    """Return the Python files in the folders and their subfolders, except hidden folders, virtual environments and caches."""
    found: dict[str, tuple[int, int]] = {}
    for top in folders:
        for folder, inner, names in os.walk(top):
            if _VIRTUAL in names and Path(folder) != top:
                inner.clear()
                continue
            inner[:] = [each for each in inner if not each.startswith(".") and each not in _IGNORED]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                if (state := _state(path)) is not None:
                    found[str(path)] = state
    return found


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # the file was deleted in the meantime, or is a broken link
        return None
    return status.st_mtime_ns, status.st_size


class _Reloader:
    def __init__(self, locator: str, *, options: Sequence[str], folders: Sequence[Path]) -> None:
        self._locator = locator
        self._options = options
        self._folders = folders
        self._seen: Seen = {}
        self._stops = 0

    def stop(self, number: int, frame: object) -> None:
        del number, frame
        self._stops += 1

    def run(self) -> None:
        shown = ",".join(map(str, self._folders))
        problem = "for development only: each change interrupts running tasks"
        _log.warning("reload_watches folders=%s problem=%r", shown, problem)
        self._seen = seen_in(self._folders)
        while not self._stops:
            tree = start_own_tree(self._locator, *self._options)
            try:
                changed = self._until_changed(tree)
                if changed:
                    _log.warning("reload_changed files=%s", some(changed, limit=_MOST_NAMES))
                self._end(tree)
            finally:
                tree.kill()
                tree.wait()
            for path in changed:
                _forget_bytecode(path)

    def _until_changed(self, tree: subprocess.Popen[bytes]) -> list[str]:
        """Return the changed files once they have stopped changing, or none if the command is stopping."""
        is_logged = False
        while not self._stops:
            sleep(_EVERY_S)
            if not is_logged and tree.poll() is not None:
                is_logged = True
                _log.warning("reload_waits exit_code=%d waits_for=%r", tree.returncode, "the next change")
            if (now := seen_in(self._folders)) != self._seen:
                while (later := _after_a_moment(self._folders)) != now:
                    now = later
                before, self._seen = self._seen, now
                return sorted(each for each in {*before, *now} if before.get(each) != now.get(each))
        return []

    def _end(self, tree: subprocess.Popen[bytes]) -> None:
        """Drain and stop the tree, or stop it immediately if this command is stopping."""
        tree.terminate()
        deadline: float | None = None
        while tree.poll() is None and (deadline is None or monotonic() < deadline):
            if self._stops and deadline is None:
                tree.send_signal(signal.SIGINT)  # the second signal; two SIGTERM signals could arrive as one
                deadline = monotonic() + _AT_ONCE_S
            sleep(_EVERY_S / 5)


def _forget_bytecode(path: str) -> None:
    """Delete the compiled file. Python would reuse it if the source has the same size and was changed within the same second."""
    with suppress(OSError):
        Path(cache_from_source(path)).unlink()


def _after_a_moment(folders: Sequence[Path]) -> Seen:
    sleep(_EVERY_S)  # editors write several files, or one file in several steps
    return seen_in(folders)


QueuesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--queues", "--queue", metavar="NAMES", help="Serve only these: mail,films; can be repeated."
    ),
]
ConcurrencyOption: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Async tasks at once in each process.")
]
ThreadsOption: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Tasks in threads at once in each process.")
]
TaskProcessesOption: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Tasks with run_in='process' at once in each process.")
]
SlotOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar=SLOT_VARIABLE,
        metavar="NAME",
        help="A name that only one supervisor can hold at a time, such as web-0.",
    ),
]
LogLevelOption: TypeAlias = Annotated[
    str, typer.Option(metavar="LEVEL", envvar=LOG_LEVEL_VARIABLE, help="debug, info, warning or error.")
]
LogFormatOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        envvar=FORMAT_VARIABLE,
        help="text, or json: each line on stderr is one JSON object.",
    ),
]
CaptureLogsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Store what tasks log from this level on: debug, info, warning, error or critical.",
    ),
]
ProbeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve /livez, /readyz, /startupz and /metrics at this address, or at all addresses: :8090.",
    ),
]
ProbeFileOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Touch this file each second while the supervisor is alive."),
]
ReloadOption: TypeAlias = Annotated[
    bool,
    typer.Option("--reload", help="For development: restart when a Python file changes, with a grace of 2s."),
]
ReloadDirOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--reload-dir",
        metavar="DIR",
        help="With --reload, watch this folder instead of the current folder; can be repeated.",
    ),
]

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_OPTIONS: Final = {
    "async_concurrency": "--concurrency",
    "thread_concurrency": "--threads",
    "process_concurrency": "--task-processes",
    "poll_interval": "--poll",
    "max_tasks_per_process": "--max-tasks-per-process",
    "max_rss": "--max-rss",
    "capture_logs": "--capture-logs",
    "WorkerConfig": "the options",
}

_SETTING: Final = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")


@commands.command()
def worker(
    locator: LocatorArgument,
    *,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes.")] = None,
    queues: QueuesOption = None,
    concurrency: ConcurrencyOption = None,
    threads: ThreadsOption = None,
    task_processes: TaskProcessesOption = None,
    prefetch: Annotated[
        int | None, typer.Option(min=0, help="How many fast tasks to claim beyond free slots.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long running tasks can continue after SIGTERM."),
    ] = None,
    poll: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The longest time between two polls.")
    ] = None,
    slot: SlotOption = None,
    max_tasks_per_process: Annotated[
        int | None, typer.Option(min=1, help="Replace a process after this many tasks.")
    ] = None,
    max_rss: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Replace a process that uses more memory: 512MB.")
    ] = None,
    capture_logs: CaptureLogsOption = None,
    probe: ProbeOption = None,
    probe_file: ProbeFileOption = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
    reload: ReloadOption = False,
    reload_dir: ReloadDirOption = None,
) -> None:
    """Run the tasks of an app until a signal stops it.

    The database and schema are those of App(...), or EVERBEAT_DATABASE_URL. Omitted options come from the app's
    WorkerConfig. SIGTERM or Ctrl-C drains: the worker claims nothing new, lets running tasks finish, and releases the
    others. A second signal stops at once. Logs go to stderr.
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
        capture_logs=capture_logs,
        slot=slot,
    )
    _require_log_options(log_level, log_format)
    call = WorkerCall(
        locator=locator,
        overrides=overrides,
        log_level=log_level,
        log_format=log_format,
        probe=probe,
        probe_file=probe_file,
    )
    if folders := checked_folders(reload_dir, reload=reload):
        show_logs(call.share_log_options())
        probes = {"probe": probe, "probe_file": probe_file}
        settings = {"grace": GRACE} | overrides | {name: value for name, value in probes.items() if value}
        run_reloading(locator, options=_as_options(settings), folders=folders)
        return
    call.run()


def _overrides(**given: Any) -> dict[str, Any]:
    overrides = {name: value for name, value in given.items() if value is not None}
    try:
        WorkerConfig(**overrides)  # rejects invalid values before anything starts
    except ConfigurationError as error:
        raise ConfigurationError([_as_option(problem) for problem in error.problems]) from None
    return overrides


def _as_options(overrides: Mapping[str, Any]) -> list[str]:
    """Return the overrides as command-line options."""
    return [
        f"{_OPTIONS.get(name, '--' + name.replace('_', '-'))}={','.join(value) if name == 'queues' else value}"
        for name, value in overrides.items()
    ]


def _as_option(problem: Problem) -> Problem:
    setting = problem.subject.removeprefix("WorkerConfig.")
    fix = _SETTING.sub(lambda named: _OPTIONS[named[0]], problem.fix)
    return replace(problem, subject=_OPTIONS.get(setting, f"--{setting}"), fix=fix)


def _names(given: list[str] | None) -> list[str] | None:
    return [name for names in given for name in names_in(names)] if given else None


def _require_log_options(level: str, form: str) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        raise typer.BadParameter(f"{level!r} is not a --log-level: use debug, info, warning or error.")
    if form.lower() not in LOG_FORMATS:
        raise typer.BadParameter(f"{form!r} is not a --log-format: use text or json.")
