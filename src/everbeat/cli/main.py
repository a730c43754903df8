"""The `everbeat` command: loads each subcommand when it is called, and maps errors to exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from everbeat import __version__
from everbeat.cli.failures import (
    MEANINGS,
    ExitCode,
    Form,
    corrected,
    exit_code_of,
    reword_validation,
    show_failure,
    show_labelled,
    wants_traceback,
    wrong_usage,
)
from everbeat.cli.help_page import with_own_help
from everbeat.cli.logs import log_warnings_and_exceptions
from everbeat.cli.streams import guarded_streams
from everbeat.errors import EverbeatError
from everbeat.runtime.inherited import correct_inherited

COMMANDS: Final = {
    "demo": ("everbeat.demo.command", "Kill workers and watch others finish their tasks."),
    "worker": ("everbeat.cli.worker", "Run the tasks of an app until a signal stops it."),
    "send": ("everbeat.cli.send", "Send one task by name."),
    "tasks": (
        "everbeat.cli.tasks",
        "List, show and change tasks: cancel, retry, run-now, move, reprioritise, delete.",
    ),
    "bulk": ("everbeat.cli.bulk", "List, show and cancel actions on all tasks that match."),
    "audit": ("everbeat.cli.bulk", "List the actions of operators."),
    "failures": ("everbeat.cli.failed", "Count failures by task, error code and exception class."),
    "dead": ("everbeat.cli.failed", "List tasks that FAILED or EXPIRED, and run them again."),
    "workflows": ("everbeat.cli.workflows", "List, show, pause, resume, cancel and retry workflows."),
    "batches": ("everbeat.cli.batches", "List, show, seal and cancel batches."),
    "workers": ("everbeat.cli.workers", "Show workers, the tasks they hold and whether they beat."),
    "queues": ("everbeat.cli.queues", "Show queues and how many tasks wait in them."),
    "schedules": (
        "everbeat.cli.schedules",
        "List, show, pause, resume, run, backfill and delete schedules.",
    ),
    "pause": ("everbeat.cli.pause_all", "Stop all claims: pause --all."),
    "resume": ("everbeat.cli.pause_all", "Allow claims again: resume --all."),
    "limits": ("everbeat.cli.limits", "List, show, set and clear limits."),
    "inbox": ("everbeat.cli.inbox", "List the questions of tasks, and answer them."),
    "recoveries": ("everbeat.cli.recoveries", "Show tasks that were recovered from dead workers."),
    "explain": (
        "everbeat.cli.explain",
        "Explain why a task, a workflow or a schedule is not running.",
    ),
    "logs": ("everbeat.cli.captured_logs", "Show what the code of a task has logged, if it was captured."),
    "doctor": ("everbeat.cli.doctor", "Check the database and the workers, and suggest fixes."),
    "top": ("everbeat.cli.top", "Watch the trees, the rates and the recoveries in the terminal."),
    "metrics": ("everbeat.cli.metrics", "Print or serve the metrics of the cluster for Prometheus."),
    "web": ("everbeat.cli.web", "Serve the dashboard in a browser."),
    "sweep": ("everbeat.cli.maintenance", "Recover the tasks of dead workers now."),
    "prune": ("everbeat.cli.maintenance", "Delete records that are past their retention now."),
    "migrate": ("everbeat.cli.migrate", "Create or upgrade the schema."),
    "check": ("everbeat.cli.check", "Report every mistake in an app's settings and tasks."),
    "bench": ("everbeat.bench.command", "Measure sends, drains, latency and recovery on this machine."),
    "db": ("everbeat.cli.database", "Start, stop and query the embedded PostgreSQL."),
}
"""Maps each command to its module and a one-line help text, so that --help does not load the commands."""


# The base class of the parser's errors. Its package differs between versions.
_USAGE_ERROR: Final[Any] = cast("type[Exception]", typer.BadParameter.__base__)


class LazyGroup(TyperGroup):
    """A command group that lists commands with their one-line help and loads only the called command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name=name, callback=None, help=summary)
        with_own_help(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load and return the command that `args` calls."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a command's module and return the command."""
    module, summary = COMMANDS[name]
    command: Any = typer.main.get_command(import_module(module).commands)
    command = getattr(command, "commands", {}).get(name, command)  # a module can contain several commands
    command.name = name
    command.help = command.help or summary
    return with_own_help(command)


def _epilog() -> str:
    codes = "\n".join(f"  {code.value:<4} {meaning}" for code, meaning in MEANINGS.items())
    return (
        "Commands use the database of --url or EVERBEAT_DATABASE_URL ('embedded' is a PostgreSQL in ./.everbeat), "
        "or that of an app: --app module:app. They use the schema of --schema or EVERBEAT_SCHEMA. "
        "A worker uses those of its app. demo and bench use --url, or the embedded server without it.\n"
        "\n"
        "Data goes to stdout, everything else to stderr. NO_COLOR=1 turns colours and bold off. "
        "EVERBEAT_DEBUG=1 shows tracebacks.\n"
        "\n"
        f"\b\nExit codes:\n{codes}"
    )


application = typer.Typer(
    cls=LazyGroup,
    epilog=_epilog(),
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@application.callback(
    help="everbeat: a PostgreSQL task queue that detects dead workers and recovers their tasks."
)
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with an `ExitCode`."""
    correct_inherited()
    with guarded_streams():
        _run(arguments)


def _run(arguments: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    form = Form.of(given)
    if form is Form.LINES:
        log_warnings_and_exceptions()
    command = typer.main.get_command(application)
    try:
        code = command.main(args=given, prog_name="everbeat", standalone_mode=False)
    except (EverbeatError, typer.Abort) as problem:
        fail(problem, given)
    except _USAGE_ERROR as problem:
        _show_wrong_usage(problem, given, form=form)
        sys.exit(ExitCode.USAGE)
    sys.exit(code)


def fail(problem: BaseException, given: Sequence[str]) -> NoReturn:
    """Report an error of a command, or its interruption, and exit. `given` is the command line."""
    if not isinstance(problem, EverbeatError):
        sys.exit(ExitCode.INTERRUPTED)
    if wants_traceback():
        raise problem
    show_failure(problem, form=Form.of(given))
    sys.exit(exit_code_of(problem))


def _show_wrong_usage(problem: Any, given: Sequence[str], *, form: Form) -> None:
    reword_validation(problem)
    if form is not Form.TEXT:
        show_failure(wrong_usage(problem, given), form=form)
        return
    if type(problem).show is not _USAGE_ERROR.show:  # shows the full help if the command is missing
        problem.show()
        return
    if (context := getattr(problem, "ctx", None)) is not None:
        print(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", file=sys.stderr)
    show_labelled("error", problem.format_message())
    if (fix := corrected(problem, given)) is not None:
        show_labelled("fix", fix)
