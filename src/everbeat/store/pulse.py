"""The statements of the pulse: one sample of all trees, and the stored heartbeats before the first sample."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.pulse.sample import (
    PulseSample,
    SampledAction,
    SampledRecovery,
    SampledTree,
    SampledWorker,
    StoredBeat,
)
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_RECOVERIES: Final = 1_000
"""How many new recoveries one sample returns, the latest ones."""
MOST_ACTIONS: Final = 1_000
"""How many actions of operators one sample returns, the latest ones."""
OVERLAP: Final = 20
"""How many ids before the last known action are read again. An action that commits late has a lower id than others that were seen."""
MOST_BEATS: Final = 20_000
"""How many stored heartbeats are read: 90 s of 500 trees that beat every 3 s."""

_trees = msgspec.json.Decoder(tuple[SampledTree, ...])
_workers = msgspec.json.Decoder(tuple[SampledWorker, ...])
_actions = msgspec.json.Decoder(tuple[SampledAction, ...])
_recoveries = msgspec.json.Decoder(tuple[SampledRecovery, ...])


def sample(
    rules: SilenceRules,
    *,
    margin_ms: int,
    window_ms: int,
    known: Collection[str] | None,
    after_recovery: int | None,
    after_action: int | None = None,
) -> Statement[PulseSample]:
    """Return a sample of all trees that live, and of the trees `known` (None: of all) those that ended within `window_ms`.

    The recoveries are those with a higher number than `after_recovery`; None returns none. The actions of operators are those after
    `after_action`, and some before it. A lease is overdue if it should have been
    recovered more than `margin_ms` ago.
    """
    parameters = {
        "claimed_ms": rules.claimed_ms, "running_ms": rules.running_ms, "multiplier": rules.multiplier,
        "resilient_flags": list(rules.resilient_flags), "margin_ms": margin_ms, "window_ms": window_ms,
        "known": None if known is None else list(known), "after_recovery": after_recovery, "most_recoveries": MOST_RECOVERIES,
        **_actions_after(after_action),
    }  # fmt: skip
    return Statement("pulse/sample", parameters, _read)


def _read(found: Sequence[Row]) -> PulseSample:
    at, is_standby, trees, workers, recoveries, actions, overdue, overdue_ms, last_recovery = found[0]
    return PulseSample(
        at=at,
        is_standby=is_standby,
        trees=_trees.decode(trees or b"[]"),
        workers=_workers.decode(workers or b"[]"),
        recoveries=_recoveries.decode(recoveries or b"[]"),
        actions=_actions.decode(actions or b"[]"),
        overdue=overdue,
        overdue_ms=overdue_ms,
        last_recovery=last_recovery or 0,
    )


def latest_actions(after: int | None) -> Statement[list[SampledAction]]:
    """Return the actions of operators after the one with this id, newest first, and some before it. None returns the latest ones."""
    return Statement("audit/list_latest", _actions_after(after), rows.each(SampledAction))


def _actions_after(last_id: int | None) -> dict[str, int | None]:
    return {"after_action": last_id, "overlap": OVERLAP, "most_actions": MOST_ACTIONS}


def stored_beats(*, window_ms: int) -> Statement[list[StoredBeat]]:
    """Return the heartbeats of the last `window_ms`, oldest first."""
    parameters = {"window_ms": window_ms, "limit": MOST_BEATS}
    return Statement("pulse/list_beats", parameters, rows.each(StoredBeat))
