"""Test RecoveryConfig: the documented defaults, bounds and rules."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from everbeat.config import RecoveryConfig
from everbeat.errors import ConfigurationError

PAGE_DEFAULTS = {
    "auto_requeue_stale_claimed": True,
    "claimed_stale_threshold_ms": 120_000,
    "auto_fail_stale_running": True,
    "running_stale_threshold_ms": 300_000,
    "check_interval_ms": 30_000,
    "runner_heartbeat_interval_ms": 30_000,
    "claimer_heartbeat_interval_ms": 30_000,
    "heartbeat_retention_hours": 24,
    "worker_state_retention_hours": 168,
    "terminal_record_retention_hours": 720,
    "captured_log_retention_hours": 168,
}
OTHER_DEFAULTS = {
    "retention_interval_ms": 3_600_000,
    "worker_state_snapshot_interval_ms": 30_000,
    "recovery_delay_ms": 0,
    "sweep_batch_size": 100,
    "resilient_sweep_threshold_multiplier": 3,
    "resilient_task_flags": ("infrastructure_resilient",),
    "detect_child_exit": True,
    "detect_session_loss": True,
    "session_grace_ms": 1_500,
    "mass_session_grace_ms": 30_000,
    "hang_timeout_ms": None,
    "max_crashes": 3,
    "max_losses": 10,
    "startup_reconciliation": True,
    "self_fence": False,
    "hook_timeout_ms": 5_000,
    "brake_after_crashes": 50,
    "brake_window_ms": 60_000,
}
SWITCHES = [name for name, value in (PAGE_DEFAULTS | OTHER_DEFAULTS).items() if isinstance(value, bool)]
RETENTIONS = [name for name in PAGE_DEFAULTS if name.endswith("_retention_hours")]

SLOW = {"claimed_stale_threshold_ms": 3_600_000, "running_stale_threshold_ms": 7_200_000}
FAST = {"runner_heartbeat_interval_ms": 1_000, "claimer_heartbeat_interval_ms": 1_000}

# name, lowest, highest, what else must be set for both ends to be free of contradictions
PAGE_BOUNDS = [
    ("claimed_stale_threshold_ms", 1_000, 3_600_000, FAST),
    ("running_stale_threshold_ms", 1_000, 7_200_000, FAST),
    ("check_interval_ms", 1_000, 600_000, {}),
    ("runner_heartbeat_interval_ms", 1_000, 120_000, SLOW),
    ("claimer_heartbeat_interval_ms", 1_000, 120_000, SLOW),
]
OTHER_BOUNDS = [
    ("retention_interval_ms", 1_000, 86_400_000, {}),
    ("worker_state_snapshot_interval_ms", 1_000, 300_000, {}),
    ("recovery_delay_ms", 0, 86_400_000, {}),
    ("sweep_batch_size", 1, 10_000, {}),
    ("resilient_sweep_threshold_multiplier", 1, 100, {}),
    ("session_grace_ms", 100, 60_000, {}),
    ("mass_session_grace_ms", 1_000, 3_600_000, {}),
    ("hang_timeout_ms", 2_000, 86_400_000, {}),
    ("max_crashes", 1, 100, {}),
    ("max_losses", 1, 1_000, {}),
    ("hook_timeout_ms", 100, 60_000, {}),
    ("brake_after_crashes", 1, 100_000, {}),
    ("brake_window_ms", 1_000, 86_400_000, {}),
    *((name, 1, 1_000_000, {}) for name in RETENTIONS),
]


def problems_of(**settings: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**settings)
    return [
        (problem.code, problem.subject.removeprefix("RecoveryConfig.")) for problem in refusal.value.problems
    ]


def message_of(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**settings)
    return str(refusal.value)


def test_the_recovery_defaults_are_the_documented_ones() -> None:  # A1
    config = RecoveryConfig()
    assert {name: getattr(config, name) for name in PAGE_DEFAULTS} == PAGE_DEFAULTS


def test_every_recovery_setting_has_a_documented_default() -> None:
    assert RecoveryConfig().values() == PAGE_DEFAULTS | OTHER_DEFAULTS


@pytest.mark.parametrize("threshold", [30_000, 59_999])
def test_a_running_threshold_below_two_beats_is_refused(threshold: int) -> None:  # A2
    message = message_of(running_stale_threshold_ms=threshold, runner_heartbeat_interval_ms=30_000)
    assert "running_stale_threshold_ms" in message
    assert "runner_heartbeat_interval_ms" in message
    for value in (str(threshold), "30000", "60000"):
        assert value in message


def test_a_running_threshold_of_two_beats_is_accepted() -> None:  # A2
    config = RecoveryConfig(running_stale_threshold_ms=60_000, runner_heartbeat_interval_ms=30_000)
    assert config.running_stale_threshold_ms == 60_000


def test_a_claimed_threshold_below_two_beats_of_the_claimer_is_refused() -> None:  # A3
    message = message_of(claimed_stale_threshold_ms=119_999, claimer_heartbeat_interval_ms=60_000)
    for text in ("claimed_stale_threshold_ms", "claimer_heartbeat_interval_ms", "119999", "60000", "120000"):
        assert text in message
    accepted = RecoveryConfig(claimed_stale_threshold_ms=120_000, claimer_heartbeat_interval_ms=60_000)
    assert accepted.claimed_stale_threshold_ms == 120_000


def test_an_interval_longer_than_half_the_default_threshold_is_refused() -> None:  # A3
    assert problems_of(claimer_heartbeat_interval_ms=60_001) == [
        ("THRESHOLD_TOO_LOW", "claimed_stale_threshold_ms")
    ]
    assert RecoveryConfig(claimer_heartbeat_interval_ms=60_000).warnings() != []


def test_the_fix_of_contradictory_thresholds_names_both_settings() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(running_stale_threshold_ms=59_999)
    assert refusal.value.problems[0].fix == (
        "set running_stale_threshold_ms to 60000 or more, or runner_heartbeat_interval_ms to 29999 or less"
    )
    RecoveryConfig(running_stale_threshold_ms=59_999, runner_heartbeat_interval_ms=29_999)


@pytest.mark.parametrize(("name", "lowest", "highest", "beside"), PAGE_BOUNDS + OTHER_BOUNDS)
def test_a_recovery_setting_accepts_its_bounds_and_refuses_values_beyond(
    name: str, lowest: int, highest: int, beside: dict[str, int]
) -> None:  # A4
    least = 2_000 if name.endswith("_stale_threshold_ms") else lowest  # two beats at the fastest interval
    for accepted in (least, highest):
        assert getattr(RecoveryConfig(**{**beside, name: accepted}), name) == accepted
    for refused in (lowest - 1, highest + 1):
        assert ("OUT_OF_RANGE", name) in problems_of(**{**beside, name: refused})
        message = message_of(**{**beside, name: refused})
        for text in (name, str(refused), str(lowest), str(highest)):
            assert text in message


@pytest.mark.parametrize("name", ["claimed_stale_threshold_ms", "running_stale_threshold_ms"])
def test_the_lowest_threshold_is_refused_because_no_heartbeat_is_fast_enough(name: str) -> None:  # A4
    assert problems_of(**{**FAST, name: 1_000}) == [("THRESHOLD_TOO_LOW", name)]
    assert "or less" not in message_of(**{**FAST, name: 1_000})  # no interval would do


def test_several_invalid_recovery_settings_are_reported_in_one_error() -> None:  # A5
    found = problems_of(
        claimed_stale_threshold_ms=3_600_001,
        running_stale_threshold_ms=59_999,
        check_interval_ms=999,
        heartbeat_retention_hours=0,
        self_fence="no",
        sweep_batchsize=50,
        resilient_task_flags="infrastructure_resilient",
    )
    assert sorted(found) == [
        ("OUT_OF_RANGE", "check_interval_ms"),
        ("OUT_OF_RANGE", "claimed_stale_threshold_ms"),
        ("OUT_OF_RANGE", "heartbeat_retention_hours"),
        ("THRESHOLD_TOO_LOW", "running_stale_threshold_ms"),
        ("UNKNOWN_NAME", "sweep_batchsize"),
        ("WRONG_TYPE", "resilient_task_flags"),
        ("WRONG_TYPE", "self_fence"),
    ]


def test_the_configuration_error_lists_every_problem_and_the_place() -> None:  # A5
    message = message_of(check_interval_ms=0, max_losses=0)
    heading, first, second = message.splitlines()
    assert Path(__file__).name in heading
    assert heading.endswith("2 problems:")
    assert "check_interval_ms = 0" in first
    assert "max_losses = 0" in second


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("runing_stale_threshold_ms", "running_stale_threshold_ms"),
        ("running_stale_threshold", "running_stale_threshold_ms"),
        ("Check_Interval_MS", "check_interval_ms"),
        ("max_crash", "max_crashes"),
        ("resilient_job_flags", "resilient_task_flags"),
    ],
)
def test_a_misspelt_recovery_setting_is_refused_with_the_nearest_name(
    misspelt: str, right: str
) -> None:  # A5
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**{misspelt: 5_000})
    (problem,) = refusal.value.problems
    assert (problem.code, problem.subject, problem.value) == (
        "UNKNOWN_NAME",
        f"RecoveryConfig.{misspelt}",
        "5000",
    )
    assert problem.fix == f"use {right}"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("sweep_threshold", ["running_stale_threshold_ms", "claimed_stale_threshold_ms"]),
        ("STALE_THRESHOLD_MS", ["running_stale_threshold_ms", "claimed_stale_threshold_ms"]),
        ("HEARTBEAT_INTERVAL_MS", ["runner_heartbeat_interval_ms", "claimer_heartbeat_interval_ms"]),
        ("heartbeat_interval", ["runner_heartbeat_interval_ms", "claimer_heartbeat_interval_ms"]),
        ("sweep_interval", ["check_interval_ms"]),
        ("recovery_delay", ["recovery_delay_ms"]),
        ("enabled", ["auto_requeue_stale_claimed", "auto_fail_stale_running"]),
        ("sweep_threshold_secs", ["running_stale_threshold_ms", "claimed_stale_threshold_ms"]),
        ("finalizing_stale_threshold_ms", ["running_stale_threshold_ms"]),
        ("orphan_task_audit_interval_ms", ["check_interval_ms"]),
        ("retention_sweep_interval_s", ["retention_interval_ms"]),
    ],
)
def test_a_setting_name_of_another_task_queue_is_refused_with_ours(
    theirs: str, ours: list[str]
) -> None:  # A5
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**{theirs: 5_000})
    (problem,) = refusal.value.problems
    assert (problem.code, problem.rule) == ("UNKNOWN_NAME", "other systems have a setting of this name")
    assert all(name in problem.fix for name in ours)
    assert all(hasattr(RecoveryConfig(), name) for name in ours)


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        ("crashed_worker_recovery_grace_ms", "supervisors repair workflows"),
        ("phase2_quarantine_after_attempts", "supervisors repair workflows"),
        ("auto_terminate_orphaned_workflow_tasks", "supervisors repair workflows"),
        ("grace_period", "WorkerConfig(grace=...)"),
        ("ack_wait", "NatsConfig(ack_wait=...)"),
        ("stall_timeout", "App(stall_timeout=...)"),
    ],
)
def test_a_setting_that_belongs_elsewhere_is_refused_with_its_place(theirs: str, instead: str) -> None:  # A5
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**{theirs: 5_000})
    (problem,) = refusal.value.problems
    assert (problem.code, problem.rule) == ("UNKNOWN_NAME", "other systems have a setting of this name")
    assert instead in problem.fix


def test_an_unknown_setting_without_a_near_name_is_refused_with_all_names() -> None:  # A5
    message = message_of(zzz=1)
    assert all(name in message for name in PAGE_DEFAULTS)


@pytest.mark.parametrize("name", RETENTIONS)
def test_retention_settings_accept_none_and_refuse_zero_and_negative_values(name: str) -> None:  # A6
    assert getattr(RecoveryConfig(**{name: None}), name) is None
    for refused in (0, -1, -24):
        assert problems_of(**{name: refused}) == [("OUT_OF_RANGE", name)]
    assert "None" in message_of(**{name: 0})


def test_the_documented_settings_for_long_and_short_tasks_are_valid() -> None:  # A7
    heavy = RecoveryConfig(runner_heartbeat_interval_ms=60_000, running_stale_threshold_ms=600_000)
    quick = RecoveryConfig(runner_heartbeat_interval_ms=10_000, running_stale_threshold_ms=30_000)
    assert heavy.warnings() == quick.warnings() == []


def test_switching_off_automatic_recovery_is_accepted_with_warnings() -> None:  # A7
    config = RecoveryConfig(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    first, second = config.warnings()
    assert "auto_requeue_stale_claimed" in first
    assert "auto_fail_stale_running" in second


def test_pruning_can_be_switched_off_and_retention_extended_as_documented() -> None:  # A7
    off = RecoveryConfig(**dict.fromkeys(RETENTIONS))
    longer = RecoveryConfig(
        heartbeat_retention_hours=48,
        worker_state_retention_hours=24 * 14,
        terminal_record_retention_hours=24 * 90,
    )
    assert [getattr(off, name) for name in RETENTIONS] == [None] * len(RETENTIONS)
    assert longer.terminal_record_retention_hours == 2_160


@pytest.mark.parametrize("wrong", [True, "30000", 30_000.0, None, [30_000]])
def test_a_recovery_setting_of_another_type_is_refused(wrong: object) -> None:
    assert problems_of(check_interval_ms=wrong) == [("WRONG_TYPE", "check_interval_ms")]


@pytest.mark.parametrize(
    ("name", "given", "fix"),
    [
        ("running_stale_threshold_ms", "5m", "pass 300000 (5m in milliseconds)"),
        ("running_stale_threshold_ms", timedelta(minutes=5), "pass 300000 (5m in milliseconds)"),
        ("running_stale_threshold_ms", 300_000.0, "pass 300000"),
        ("running_stale_threshold_ms", "300000", "pass 300000 (without quotes)"),
        ("check_interval_ms", "500ms", "use 1000 or more, not 500 (500ms in milliseconds)"),
        ("check_interval_ms", timedelta(hours=1), "use 600000 or less, not 3600000 (1h in milliseconds)"),
        ("check_interval_ms", "soon", "pass an int such as 1000, not str"),
        ("check_interval_ms", 0.5, "pass an int such as 1000, not float"),
        ("heartbeat_retention_hours", "2d", "pass 48 (2d in hours), or None, which never prunes them"),
        (
            "heartbeat_retention_hours",
            "90m",
            "pass 2 (90m in hours, rounded up), or None, which never prunes them",
        ),
        ("max_crashes", "3", "pass 3 (without quotes)"),
    ],
)
def test_the_fix_of_a_wrong_type_proposes_the_intended_number(
    name: str, given: object, fix: str
) -> None:  # A4
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**{name: given})  # type: ignore[arg-type]
    (problem,) = refusal.value.problems
    assert (problem.code, problem.subject, problem.fix) == ("WRONG_TYPE", f"RecoveryConfig.{name}", fix)


@pytest.mark.parametrize(
    "name", [each for each in (PAGE_DEFAULTS | OTHER_DEFAULTS) if each.endswith(("_ms", "_hours"))]
)
def test_every_duration_given_as_text_is_refused_with_its_number(name: str) -> None:  # A4
    hours = 2 if name.endswith("_hours") else 7_200_000
    assert f"{hours} (2h in " in message_of(**{name: "2h"})


@pytest.mark.parametrize("name", SWITCHES)
def test_a_boolean_setting_accepts_only_true_and_false(name: str) -> None:
    assert getattr(RecoveryConfig(**{name: False}), name) is False
    for wrong in (1, 0, "false", None):
        assert problems_of(**{name: wrong}) == [("WRONG_TYPE", name)]


def test_a_wrong_type_in_a_rule_between_two_settings_is_reported_once() -> None:
    assert problems_of(runner_heartbeat_interval_ms="30s") == [("WRONG_TYPE", "runner_heartbeat_interval_ms")]
    assert problems_of(running_stale_threshold_ms=None) == [("WRONG_TYPE", "running_stale_threshold_ms")]


def test_resilient_task_flags_must_be_names() -> None:
    assert RecoveryConfig(resilient_task_flags=["a", "b"]).resilient_task_flags == ("a", "b")
    assert RecoveryConfig(resilient_task_flags=[]).resilient_task_flags == ()
    assert problems_of(resilient_task_flags=["a", "", 3]) == [
        ("WRONG_NAME", "resilient_task_flags[1]"),
        ("WRONG_TYPE", "resilient_task_flags[2]"),
    ]
