"""How long a holder may be silent before a lease is stale: by state, and longer for resilient tasks.

What lives here: reading that from the configuration, an operator's overrides included. What may not: silence itself.
A tree beats as often as its own configuration says, and writes the thresholds that follow from it. An observer with shorter ones would
take a living tree for dead, so the longer of the two counts, unless an operator gave the threshold.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from everbeat.config import RecoveryConfig
from everbeat.domain.states import TaskState
from everbeat.services.orders import flags_of
from everbeat.store.leases import Lease
from everbeat.store.workers import WatchedBeats


class Thresholds(Struct, frozen=True, kw_only=True):
    """Silence in ms from which a lease is stale; None: leases of this state are left alone. `exact`: what trees wrote does not count."""

    claimed_ms: int | None
    running_ms: int | None
    resilient_flags: Collection[str]
    multiplier: int
    exact: bool = False

    @classmethod
    def automatic(cls, config: RecoveryConfig) -> Self:
        """Those of automatic recovery, by its switches."""
        return cls(
            claimed_ms=config.claimed_stale_threshold_ms if config.auto_requeue_stale_claimed else None,
            running_ms=config.running_stale_threshold_ms if config.auto_fail_stale_running else None,
            resilient_flags=config.resilient_task_flags,
            multiplier=config.resilient_sweep_threshold_multiplier,
        )

    @classmethod
    def manual(
        cls,
        config: RecoveryConfig,
        *,
        threshold_ms: int | None = None,
        resilient_flags: Collection[str] | None = None,
        multiplier: int | None = None,
    ) -> Self:
        """Those of an operator's sweep, who decides whatever the switches say; None takes the configuration's."""
        return cls(
            claimed_ms=config.claimed_stale_threshold_ms if threshold_ms is None else threshold_ms,
            running_ms=config.running_stale_threshold_ms if threshold_ms is None else threshold_ms,
            resilient_flags=config.resilient_task_flags if resilient_flags is None else resilient_flags,
            multiplier=config.resilient_sweep_threshold_multiplier if multiplier is None else multiplier,
            exact=threshold_ms is not None,
        )

    def judging(self, tree: Lease | WatchedBeats) -> Self:
        """Those for one tree: the longer of these and what it wrote."""
        if self.exact:
            return self
        return replace(
            self,
            claimed_ms=_longer(self.claimed_ms, tree.claimed_stale_ms),
            running_ms=_longer(self.running_ms, tree.running_stale_ms),
        )

    def of(self, lease: Lease) -> int | None:
        """The threshold of one lease in ms; None: it is left alone."""
        own = self.judging(lease)
        plain = own.running_ms if lease.state is TaskState.RUNNING else own.claimed_ms
        if plain is None or not self._is_resilient(lease):
            return plain
        return plain * self.multiplier

    def all_ms(self) -> list[int]:
        """Every threshold that a lease may have, the least first; empty when all are left alone."""
        plain = {each for each in (self.claimed_ms, self.running_ms) if each is not None}
        return sorted(plain | {each * self.multiplier for each in plain})

    @property
    def longest_plain_ms(self) -> int:
        """The threshold after which a silent supervisor without leases is given up."""
        return max(self.claimed_ms or 0, self.running_ms or 0)

    def is_stale(self, lease: Lease) -> bool:
        """Whether it has been silent for its threshold by the database's clock."""
        threshold_ms = self.of(lease)
        return threshold_ms is not None and lease.silent_ms >= threshold_ms

    def _is_resilient(self, lease: Lease) -> bool:
        flags = flags_of(lease)
        return any(flags.get(name, False) for name in self.resilient_flags)


def _longer(own_ms: int | None, tree_ms: int | None) -> int | None:
    return None if own_ms is None else max(own_ms, tree_ms or 0)
