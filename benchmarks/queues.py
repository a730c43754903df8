"""Install other queues, each in its own environment, and measure them in the same rounds as everbeat."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.programs import Figures, Program, ProgramFailed, copied, measured_by, run, say
from everbeat.bench.environment import BEST, DEFAULTS, Bench
from everbeat.bench.latency import P50, P99
from everbeat.bench.sampling import Measurement, MeasurementGroup, Sample
from everbeat.bench.throughput import AWAITED, bulk_name, drain_name

_INSTALL_S: Final = 300.0


class FromPyPI(Struct, frozen=True):
    """A Python queue: its adapter, and the packages that pip installs, starting with the queue itself."""

    adapter: str
    packages: tuple[str, ...]

    def install(self, name: str, folder: Path) -> Program:
        """Create a virtual environment with the packages. Raises ProgramFailed."""
        run([sys.executable, "-m", "venv", str(folder)], folder=folder, within_s=_INSTALL_S)
        python = str(folder / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, *self.packages], folder=folder, within_s=_INSTALL_S)
        ask = f"from importlib.metadata import version; print(version({self.packages[0]!r}))"
        version = run([python, "-c", ask], folder=folder, within_s=_INSTALL_S).strip()
        command = (python, copied(self.adapter, folder))
        return Program(name=name, version=version, folder=folder, command=command)


class FromNpm(Struct, frozen=True):
    """A Node queue: its adapter and its package."""

    adapter: str
    package: str

    def install(self, name: str, folder: Path) -> Program:
        """Install the package into the folder. Raises ProgramFailed."""
        node, npm = _found("node"), _found("npm")
        install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
        run([*install, self.package], folder=folder, within_s=_INSTALL_S)
        ask = f"require('{self.package}/package.json').version"
        version = run([node, "-p", ask], folder=folder, within_s=_INSTALL_S).strip()
        command = (node, copied(self.adapter, folder))
        return Program(name=name, version=version, folder=folder, command=command)


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ProgramFailed(f"It needs {name}, which is not on PATH.", fix="install Node with npm.")
    return path


QUEUES: Final[Mapping[str, FromPyPI | FromNpm]] = {
    "pgqueuer": FromPyPI("pgqueuer.py", ("pgqueuer", "asyncpg", "uvloop")),
    "procrastinate": FromPyPI("procrastinate.py", ("procrastinate", "psycopg[binary]")),
    "graphile-worker": FromNpm("graphile_worker.mjs", "graphile-worker"),
}


@contextmanager
def installed(names: Sequence[str]) -> Iterator[list[Program]]:
    """Install these queues and yield those that could be installed. Their environments are deleted afterwards."""
    with TemporaryDirectory(prefix="everbeat-bench-", ignore_cleanup_errors=True) as folder:
        found = []
        for name in names:
            say(f"installing: {name}")
            (Path(folder) / name).mkdir()
            try:
                found.append(QUEUES[name].install(name, Path(folder) / name))
            except ProgramFailed as problem:
                _leave_out(name, problem)
        yield found


def _leave_out(name: str, problem: ProgramFailed) -> None:
    say(f"warning: {name} is left out: {problem.message}")
    if problem.fix is not None:
        say(f"fix: {problem.fix}")


def require_one(queues: Sequence[str], figures: Sequence[str]) -> None:
    """Raise ProgramFailed if none of the queues has a figure."""
    if not any(figure.startswith(f"{queue}: ") for queue in queues for figure in figures):
        raise ProgramFailed("None of these queues could be measured.", fix="see the warnings above.")


def group_with_queues(
    group: MeasurementGroup, queues: Sequence[Program], bench: Bench, *, jobs: int
) -> MeasurementGroup:
    """Return the group with measurements of the other queues added to it."""
    others = [
        Measurement(
            name=f"{queue.name}: {group.name}",
            take=partial(_taken, queue, bench, jobs=jobs, part=group.name),
        )
        for queue in queues
    ]
    return replace(group, measurements=(*group.measurements, *others))


def _taken(queue: Program, bench: Bench, *, jobs: int, part: str) -> Iterator[Sample]:
    # The server then does not clean up after everbeat during the measurement.
    bench.execute("truncate_tasks")
    yield from queue_samples(queue, bench.target.url, jobs=jobs, part=part)


def queue_samples(queue: Program, url: str, *, jobs: int, part: str) -> Iterator[Sample]:
    """Yield the samples of one queue for this part. If the queue fails, print the reason and leave it out."""
    say(f"measuring: {queue.name} {queue.version}")
    try:
        figures = measured_by(queue, url, jobs, [part])
    except ProgramFailed as problem:
        _leave_out(queue.name, problem)
        return
    for what, value, unit, beside in _named(figures, jobs)[part]:
        if value is not None:
            yield Sample(name=f"{queue.name}: {what}", value=value, unit=unit, beside=beside)


def _named(figures: Figures, jobs: int) -> dict[str, list[tuple[str, float | None, str, str]]]:
    """Return, for each part, the names of its figures and the everbeat figures that they are compared with."""
    best = "drain, 1 worker process, beside the best settings"
    return {
        "send": [
            ("send, one at a time", figures.single_per_s, "jobs/s", AWAITED),
            (f"send of {jobs:,} at once", figures.bulk_per_s, "jobs/s", bulk_name(jobs)),
        ],
        "drain": [
            ("drain, 1 worker process", figures.drain_per_s, "jobs/s", drain_name(DEFAULTS)),
            (best, figures.drain_per_s, "jobs/s", drain_name(BEST)),
        ],
        "latency": [
            ("idle, send to code: p50", figures.latency_p50_ms, "ms", P50),
            ("idle, send to code: p99", figures.latency_p99_ms, "ms", P99),
        ],
    }
