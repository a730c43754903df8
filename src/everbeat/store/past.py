"""The statements of the as-of view: what lived, ran and waited at a past moment. Each reads a bounded part of its table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.past import PastRun, PastSample, PastSetting
from everbeat.domain.pulse.sample import PulseSample, SampledTree, SampledWorker, StoredBeat
from everbeat.domain.series import DepthBucket
from everbeat.store import rows
from everbeat.store.inspection import read_recoveries
from everbeat.store.pulse import MOST_BEATS
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_TREES: Final = 1_000
MOST_ACTIONS: Final = 20_000
MOST_QUEUES: Final = 1_000
_SAMPLE_AGE_MS: Final = 2 * 3_600_000
"""How old the last sample of the queues may be. After two days, one sample an hour is left."""

_trees = msgspec.json.Decoder(tuple[SampledTree, ...])
_workers = msgspec.json.Decoder(tuple[SampledWorker, ...])


def sample_trees(at: datetime, *, window_ms: int) -> Statement[PastSample]:
    """Return the trees that lived at a moment or had ended within `window_ms` before it."""

    def read(found: Sequence[Row]) -> PastSample:
        moment, is_standby, trees, workers, beats_since = found[0]
        sample = PulseSample(
            at=moment,
            is_standby=is_standby,
            trees=_trees.decode(trees or b"[]"),
            workers=_workers.decode(workers or b"[]"),
        )
        return PastSample(sample=sample, beats_since=beats_since)

    return Statement("past/sample_trees", {"at": at, "window_ms": window_ms, "limit": MOST_TREES}, read)


def beats(at: datetime, *, window_ms: int) -> Statement[list[StoredBeat]]:
    """Return the heartbeats of `window_ms` before a moment, oldest first."""
    parameters = {"at": at, "window_ms": window_ms, "limit": MOST_BEATS}
    return Statement("past/list_beats", parameters, rows.each(StoredBeat))


def runs(at: datetime, *, limit: int) -> Statement[list[PastRun]]:
    """Return up to `limit` attempts whose code ran at a moment, those that had started first come first."""

    def read(found: Sequence[Row]) -> list[PastRun]:
        return [PastRun(**dict(zip(PastRun.__struct_fields__, row, strict=True))) for row in found]

    return Statement("past/list_runs", {"at": at, "limit": limit}, read)


def recoveries(at: datetime, *, window_ms: int, limit: int) -> Statement[list[RecoveryInfo]]:
    """Return up to `limit` recoveries that were noticed within `window_ms` before a moment, the latest first."""
    parameters = {"at": at, "window_ms": window_ms, "limit": limit}
    return Statement("past/list_recoveries", parameters, read_recoveries)


def depths(at: datetime) -> Statement[list[DepthBucket]]:
    """Return the last sample of all queues before a moment."""
    parameters = {"at": at, "window_ms": _SAMPLE_AGE_MS, "limit": MOST_QUEUES}
    return Statement("past/list_depths", parameters, rows.each(DepthBucket))


def settings(at: datetime) -> Statement[list[PastSetting]]:
    """Return the last change of each pause and limit before a moment."""
    return Statement("past/list_settings", {"at": at, "limit": MOST_ACTIONS}, rows.each(PastSetting))
