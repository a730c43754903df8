"""Mistakes are raised, except where somebody gathers them; then what follows is read as well."""

from __future__ import annotations

import threading

import pytest

from everbeat.config import QueueConfig, RecoveryConfig
from everbeat.domain.gathering import StandIn, attempt, gathering, raise_or_gather
from everbeat.errors import ConfigurationError, EverbeatError


def test_outside_of_gathering_a_mistake_is_raised() -> None:
    with pytest.raises(EverbeatError, match="told"):
        raise_or_gather(EverbeatError("told"))
    with pytest.raises(ConfigurationError):
        RecoveryConfig(check_interval_ms=1)


def test_while_gathering_wrong_settings_become_defaults() -> None:
    with gathering() as mistakes:
        recovery = RecoveryConfig(check_interval_ms=1, sweep_batch_size=7)
    assert recovery.check_interval_ms == RecoveryConfig().check_interval_ms
    assert recovery.sweep_batch_size == 7
    (mistake,) = mistakes
    assert isinstance(mistake.error, ConfigurationError)
    assert mistake.where is not None
    assert mistake.where.startswith(__file__)


def test_a_wrong_value_without_a_default_stays_what_it_was() -> None:
    with gathering() as mistakes:
        assert QueueConfig("two words").name == "two words"
    assert len(mistakes) == 1


def test_attempt_gives_the_other_value_only_while_gathering() -> None:
    def fail() -> int:
        raise EverbeatError("no")

    with gathering() as mistakes:
        assert attempt(fail, otherwise=3) == 3
    assert [str(mistake.error) for mistake in mistakes] == ["no"]
    with pytest.raises(EverbeatError):
        attempt(fail, otherwise=3)


def test_other_threads_gather_nothing() -> None:
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


def test_a_stand_in_bears_what_is_done_with_tasks_at_import() -> None:
    stand_in = StandIn()
    assert stand_in.with_options(priority=3).call(1) is stand_in
    with pytest.raises(AttributeError):
        _ = stand_in.__fspath__
