"""Configuration errors raise at once, or are collected inside `gathering()` so that later code is checked too."""

from __future__ import annotations

import threading

import pytest

from everbeat.config import QueueConfig, RecoveryConfig
from everbeat.domain.settings.settings import StandIn, gathering, make_or_gather, raise_or_gather
from everbeat.errors import ConfigurationError, EverbeatError


def test_configuration_errors_raise_outside_gathering() -> None:
    with pytest.raises(EverbeatError, match="told"):
        raise_or_gather(EverbeatError("told"))
    with pytest.raises(ConfigurationError):
        RecoveryConfig(check_interval_ms=1)


def test_gathering_replaces_a_wrong_setting_by_its_default() -> None:
    with gathering() as mistakes:
        recovery = RecoveryConfig(check_interval_ms=1, sweep_batch_size=7)
    assert recovery.check_interval_ms == RecoveryConfig().check_interval_ms
    assert recovery.sweep_batch_size == 7
    (mistake,) = mistakes
    assert isinstance(mistake.error, ConfigurationError)
    assert mistake.where is not None
    assert mistake.where.startswith(__file__)


def test_gathering_keeps_a_wrong_value_that_has_no_default() -> None:
    with gathering() as mistakes:
        assert QueueConfig("two words").name == "two words"
    assert len(mistakes) == 1


def test_attempt_returns_the_other_value_only_inside_gathering() -> None:
    def fail() -> int:
        raise EverbeatError("no")

    with gathering() as mistakes:
        assert make_or_gather(fail, otherwise=3) == 3
    assert [str(mistake.error) for mistake in mistakes] == ["no"]
    with pytest.raises(EverbeatError):
        make_or_gather(fail, otherwise=3)


def test_gathering_does_not_affect_other_threads() -> None:
    raised: list[bool] = []

    def configure() -> None:
        try:
            RecoveryConfig(check_interval_ms=1)
        except ConfigurationError:
            raised.append(True)

    with gathering() as mistakes:
        thread = threading.Thread(target=configure)
        thread.start()
        thread.join()
    assert (raised, mistakes) == ([True], [])


def test_a_stand_in_supports_what_modules_do_with_tasks_at_import() -> None:
    stand_in = StandIn()
    assert stand_in.with_options(priority=3).call(1) is stand_in
    with pytest.raises(AttributeError):
        _ = stand_in.__fspath__
