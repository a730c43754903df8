"""Compare two installations of everbeat. Their interpreters run the same program alternately, in fresh processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.programs import Program, ProgramFailed, copied, measured_by, run
from everbeat.bench.command import BenchOptions
from everbeat.bench.environment import DEFAULTS, SETUPS, Bench, Setup
from everbeat.bench.sampling import Measurement, MeasurementGroup, Sample

VERSION_PARTS: Final = ("drain", "latency")
_ADAPTER: Final = "everbeat_itself.py"
_ASK: Final = """
import json, platform
from dataclasses import asdict
from importlib.metadata import version
import everbeat
from everbeat import WorkerConfig
print(json.dumps({
    "version": version("everbeat"), "place": everbeat.__file__, "python": platform.python_version(),
    "defaults": asdict(WorkerConfig()),
}, default=str))
"""
_ASK_S: Final = 60.0


class Installation(Struct, frozen=True, kw_only=True):
    """One of the two installations, as reported by its interpreter."""

    label: str
    python: str
    facts: dict[str, Any]
    adapter: str


@contextmanager
def installations(other: str) -> Iterator[list[Installation]]:
    """Yield this installation and the installation of the other interpreter. Raises ProgramFailed if one of them lacks everbeat."""
    with TemporaryDirectory(prefix="everbeat-bench-", ignore_cleanup_errors=True) as folder:
        adapter = copied(_ADAPTER, Path(folder))
        # Use an absolute path but do not resolve links, because the interpreter of a virtual environment is a link.
        pythons = {"here": sys.executable, "there": str(Path(other).absolute())}
        yield [
            Installation(label=label, python=python, facts=_asked(python, Path(folder)), adapter=adapter)
            for label, python in pythons.items()
        ]


def _asked(python: str, folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(
            run([python, "-c", _ASK], folder=folder, within_s=_ASK_S), type=dict[str, Any]
        )
    except ProgramFailed as problem:
        raise ProgramFailed(
            f"PYTHON must be an interpreter that can import everbeat: {problem.message}",
            fix="name one, for example ../other/.venv/bin/python.",
        ) from None


def version_groups(
    sides: Sequence[Installation], bench: Bench, options: BenchOptions
) -> Iterator[MeasurementGroup]:
    """Yield drains with each setup, and latency with the default settings."""
    wanted = [
        (part, setup) for part in options.parts for setup in (SETUPS if part == "drain" else [DEFAULTS])
    ]
    for part, setup in wanted:
        name = f"{part}, {setup.name}"
        yield MeasurementGroup(
            name=name,
            measurements=tuple(
                Measurement(
                    name=f"{side.label}: {name}",
                    take=partial(_samples, side, bench, tasks=options.tasks, part=part, setup=setup),
                )
                for side in sides
            ),
            rounds=options.pairs,
        )


def _samples(side: Installation, bench: Bench, *, tasks: int, part: str, setup: Setup) -> Iterator[Sample]:
    program = Program(
        name="everbeat",
        version=str(side.facts["version"]),
        folder=Path(side.adapter).parent,
        command=(side.python, side.adapter),
        variables={"WORKER_SETTINGS": json.dumps(setup.changed)},
    )
    found = measured_by(program, bench.target.url, tasks, [part])
    for what, value, unit in (
        (f"drain, 1 worker process, {setup.name}", found.drain_per_s, "tasks/s"),
        (f"idle, send to code: p50, {setup.name}", found.latency_p50_ms, "ms"),
        (f"idle, send to code: p99, {setup.name}", found.latency_p99_ms, "ms"),
    ):
        if value is not None:
            beside = f"there: {what}" if side.label == "here" else None
            yield Sample(name=f"{side.label}: {what}", value=value, unit=unit, beside=beside)
