"""`python -m benchmarks queues …` and `python -m benchmarks versions …`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from benchmarks.queues import QUEUES, group_with_queues, installed, require_one
from benchmarks.versions import VERSION_PARTS, installations, version_groups
from everbeat.bench.command import BenchOptions, measuring, one_each, run_program, running

QUEUE_PARTS: Final = ("send", "drain", "latency")

application = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


@application.command()
@measuring(QUEUE_PARTS, usual=QUEUE_PARTS)
def queues(
    options: BenchOptions,
    names: Annotated[list[str], typer.Argument(metavar="QUEUE", help=f"Of {', '.join(QUEUES)}.")],
) -> None:
    """Measure everbeat and other queues in the same run, on the same server.

    Each queue is installed into an environment in a temporary folder and works in its own database; both are
    deleted afterwards. A queue that cannot be installed or measured is named and left out. The role needs CREATEDB.
    """
    chosen = one_each(names, QUEUES, subject="QUEUE")
    with running(options) as run, installed(chosen) as peers:
        groups = [group_with_queues(group, peers, run.bench, jobs=options.tasks) for group in run.groups()]
        report = run.measured(groups, peers={peer.name: peer.version for peer in peers})
    report.publish(as_json=options.as_json)
    require_one(chosen, [figure.name for figure in report.figures])


@application.command()
@measuring(VERSION_PARTS, usual=VERSION_PARTS)
def versions(
    options: BenchOptions,
    python: Annotated[
        str,
        typer.Argument(metavar="PYTHON", help="The interpreter of an environment with another everbeat."),
    ],
) -> None:
    """Compare drains and latency of this everbeat (here) and of the one that PYTHON imports (there).

    Both run the same program, in fresh processes and in their own databases. The role needs CREATEDB.
    """
    with running(options) as run, installations(python) as sides:
        against = {side.label: {"interpreter": side.python, **side.facts} for side in sides}
        report = run.measured(version_groups(sides, run.bench, options), against=against)
    report.publish(as_json=options.as_json)


if __name__ == "__main__":
    run_program(application, name="python -m benchmarks")
