"""The state of each tree now, by the rules of the page Pulse. The CLI, the metrics and the header of each page use it."""

from __future__ import annotations

from collections.abc import Mapping

from everbeat.client.explaining import silence_rules
from everbeat.config import RecoveryConfig
from everbeat.domain.doctor.work import SWEEPS_MISSED
from everbeat.domain.pulse.judging import TreeState, judged_trees
from everbeat.store import pulse
from everbeat.store.plan import Plan, ask


def states_of_trees(config: RecoveryConfig) -> Plan[Mapping[str, TreeState]]:
    """Return the state of each tree that has not ended, by the id of its supervisor."""
    rules = silence_rules(config)
    margin_ms = SWEEPS_MISSED * rules.check_interval_ms
    sample = yield from ask(
        pulse.sample(rules, margin_ms=margin_ms, window_ms=0, known=(), after_recovery=None)
    )
    return {name: judgement.state for name, judgement in judged_trees(sample, rules).items()}
