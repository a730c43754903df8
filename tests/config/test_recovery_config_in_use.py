"""Test the use of RecoveryConfig: graphile's defaults, warnings, changed copies and JSON."""

from __future__ import annotations

import json

import pytest

from everbeat.config import RecoveryConfig
from everbeat.errors import ConfigurationError

FASTEST = {
    "runner_heartbeat_interval_ms": 1_000,
    "claimer_heartbeat_interval_ms": 1_000,
    "running_stale_threshold_ms": 2_000,
    "claimed_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}


def test_recovery_config_graphile_returns_the_graphile_defaults() -> None:
    config = RecoveryConfig.graphile()
    assert config.runner_heartbeat_interval_ms == config.claimer_heartbeat_interval_ms == 30_000
    assert config.check_interval_ms == 60_000
    assert config.claimed_stale_threshold_ms == config.running_stale_threshold_ms == 300_000
    assert config.recovery_delay_ms == 30_000
    assert config.resilient_sweep_threshold_multiplier == 3
    assert config.resilient_task_flags == ("infrastructure_resilient",)
    assert config.warnings() == []


def test_the_graphile_defaults_can_be_overridden_and_are_checked() -> None:
    assert RecoveryConfig.graphile(recovery_delay_ms=750).recovery_delay_ms == 750
    with pytest.raises(ConfigurationError, match="use recovery_delay_ms"):
        RecoveryConfig.graphile(recovery_delay=750)


def test_the_fastest_profile_is_valid_and_warned_about() -> None:
    config = RecoveryConfig(**FASTEST)
    assert [warning.split()[0] for warning in config.warnings()] == [
        "RecoveryConfig.running_stale_threshold_ms",
        "RecoveryConfig.claimed_stale_threshold_ms",
    ]


def test_switching_off_fast_death_detection_is_a_warning() -> None:
    config = RecoveryConfig(detect_child_exit=False, detect_session_loss=False)
    assert len(config.warnings()) == 1
    assert RecoveryConfig().warnings() == []


def test_a_changed_copy_is_checked_as_a_whole() -> None:
    config = RecoveryConfig()
    assert config.replace(max_crashes=5).max_crashes == 5
    assert config.max_crashes == 3
    with pytest.raises(ConfigurationError, match="60000"):
        config.replace(running_stale_threshold_ms=59_999)
    with pytest.raises(ConfigurationError, match="use max_crashes"):
        config.replace(max_crashs=5)


def test_recovery_config_round_trips_through_json() -> None:
    config = RecoveryConfig.graphile(resilient_task_flags=("a", "b"), heartbeat_retention_hours=None)
    assert RecoveryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_recovery_config_is_frozen_and_hashable() -> None:
    config = RecoveryConfig()
    with pytest.raises(AttributeError):
        config.max_crashes = 5  # type: ignore[misc]
    assert {config, RecoveryConfig()} == {config}


def test_recovery_config_refuses_positional_arguments() -> None:
    with pytest.raises(ConfigurationError, match="name the setting"):
        RecoveryConfig(True)  # type: ignore[misc]
