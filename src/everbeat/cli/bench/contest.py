"""Other queues in the same run: each on the same server, in a database of its own, by its own adapter.

Its figures are divided by ours; which of ours, is decided here. What may not live here: how a queue is driven, which is its
adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from uuid import uuid4

import msgspec

from everbeat.cli.bench.drains import ONE
from everbeat.cli.bench.environments import Peer, PeerFailed, leave_out, run
from everbeat.cli.bench.figures import Sample
from everbeat.cli.bench.idle import P50, P99
from everbeat.cli.bench.sends import AWAITED, bulk_name
from everbeat.cli.output import say
from everbeat.domain.settings import refused
from everbeat.errors import DatabaseError
from everbeat.store.own_database import own_database
from everbeat.store.target import Target

_ADAPTER_S: Final = 960.0  # adapters give up themselves after 900 s


COMPARED: Final = ("send", "drain", "idle")
"""The parts that are measured of other queues, too."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter prints; None is what it cannot measure, or was not asked for."""

    bulk_per_s: float | None = None
    single_per_s: float | None = None
    drain_per_s: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None


def require_compared(peers: Sequence[str], parts: Sequence[str]) -> None:
    """Raises ConfigurationError where queues are named and no part of theirs is to be measured."""
    if peers and not {*parts} & {*COMPARED}:
        raise refused(
            [*peers],
            subject="--peer",
            code="CONTRADICTION",
            rule=f"is compared in {', '.join(COMPARED)}, none of which --only asks for",
            fix=f"add --only {COMPARED[0]}, for example",
        )


def contest_figures(
    peers: Sequence[Peer], target: Target, *, jobs: int, parts: Sequence[str]
) -> Iterator[Sample]:
    """Of each queue, one after the other; what goes wrong with one is told, and that one left out."""
    for peer in peers:
        say(f"measuring: {peer.name} {peer.version}")
        try:
            measured = _measured(peer, target, jobs, parts)
        except (PeerFailed, DatabaseError) as problem:
            leave_out(peer.name, problem)
        else:
            yield from _samples(peer.name, measured, jobs, parts)


def require_one(peers: Sequence[str], figures: Sequence[str]) -> None:
    """Raises PeerFailed where queues were named and the names of the figures show none of them."""
    if peers and not any(figure.startswith(f"{peer}: ") for peer in peers for figure in figures):
        raise PeerFailed(
            "None of the queues named by --peer could be measured.", fix="see the warnings above."
        )


def _measured(peer: Peer, target: Target, jobs: int, parts: Sequence[str]) -> _Measured:
    database = f"everbeat_bench_{peer.name.replace('-', '_')}_{uuid4().hex[:8]}"
    with own_database(target, database) as url:
        # In the environment, not among the arguments, which every user of the machine can read.
        written = run(
            [*peer.command, str(jobs), *(part for part in COMPARED if part in parts)],
            folder=peer.folder,
            within_s=_ADAPTER_S,
            variables={"DATABASE_URL": url},
        )
    try:
        return msgspec.json.decode(written, type=_Measured)
    except msgspec.DecodeError as problem:
        raise PeerFailed(f"Its adapter printed something else than figures: {problem}.") from problem


def _samples(name: str, measured: _Measured, jobs: int, parts: Sequence[str]) -> Iterator[Sample]:
    for part, what, value, unit, beside in (
        ("send", "send, one at a time", measured.single_per_s, "jobs/s", AWAITED),
        ("send", f"send of {jobs:,} at once", measured.bulk_per_s, "jobs/s", bulk_name(jobs)),
        ("drain", "drain, 1 worker process", measured.drain_per_s, "jobs/s", ONE),
        ("idle", "idle, send to code: p50", measured.latency_p50_ms, "ms", P50),
        ("idle", "idle, send to code: p99", measured.latency_p99_ms, "ms", P99),
    ):
        if value is not None and part in parts:
            yield Sample(name=f"{name}: {what}", value=value, unit=unit, beside=beside)
