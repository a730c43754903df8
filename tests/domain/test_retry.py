"""RetryPolicy: bounds, the formula of the delay, and the failures that it matches."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import WORKER_CRASHED, ConfigurationError


class FixedDice(Random):
    """A random source that always returns one value."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def problems_of(**settings: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigurationError) as refusal:
        RetryPolicy(**settings)
    return [
        (problem.code, problem.subject.removeprefix("RetryPolicy.")) for problem in refusal.value.problems
    ]


def delays(policy: RetryPolicy, *, dice: float = 0.0) -> list[float]:
    return [policy.delay(number, FixedDice(dice)) for number in range(1, policy.max_retries + 1)]


def test_the_defaults_of_a_retry_policy_are_documented_values() -> None:
    policy = RetryPolicy()
    assert (policy.max_retries, policy.backoff_strategy, policy.intervals_s) == (3, "fixed", (1.0,))
    assert (policy.jitter, policy.max_delay_s, policy.auto_retry_for) == (0.1, None, ())


@pytest.mark.parametrize("count", [1, 20])
def test_max_retries_accepts_1_to_20(count: int) -> None:
    assert RetryPolicy(max_retries=count).max_retries == count


@pytest.mark.parametrize(
    ("count", "code"), [(0, "OUT_OF_RANGE"), (21, "OUT_OF_RANGE"), (True, "WRONG_TYPE"), ("3", "WRONG_TYPE")]
)
def test_max_retries_rejects_other_counts(count: Any, code: str) -> None:
    assert problems_of(max_retries=count) == [(code, "max_retries")]


@pytest.mark.parametrize("interval", [1, 86_400, "1s", "1d", timedelta(minutes=1), 1.5])
def test_intervals_accept_1_second_to_1_day(interval: Any) -> None:
    assert len(RetryPolicy(intervals=[interval]).intervals_s) == 1


@pytest.mark.parametrize("interval", [0, 0.999, 86_400.001, "25h", -1, "soon", None, True])
def test_intervals_reject_other_values_and_name_their_position(interval: Any) -> None:
    assert [name for _, name in problems_of(max_retries=2, intervals=[5, interval])] == ["intervals[1]"]


def test_a_retry_policy_has_1_to_20_intervals() -> None:
    assert len(RetryPolicy(max_retries=20, intervals=[1] * 20).intervals_s) == 20
    assert problems_of(intervals=[]) == [("WRONG_COUNT", "intervals")]
    assert ("WRONG_COUNT", "intervals") in problems_of(max_retries=20, intervals=[1] * 21)


def test_fixed_backoff_repeats_one_interval_or_follows_the_list() -> None:  # B4
    assert delays(RetryPolicy(intervals=["10s"])) == [10, 10, 10]
    assert delays(RetryPolicy(intervals=[60, 300, 900])) == [60, 300, 900]
    assert problems_of(intervals=[1, 2]) == [("CONTRADICTION", "intervals")]
    assert problems_of(max_retries=1, intervals=[1, 2, 3]) == [("CONTRADICTION", "intervals")]


def test_exponential_backoff_doubles_one_interval() -> None:  # B4
    policy = RetryPolicy(max_retries=5, backoff_strategy="exponential", intervals=[2])
    assert delays(policy) == [2, 4, 8, 16, 32]
    assert problems_of(backoff_strategy="exponential", intervals=[1, 2, 4]) == [
        ("CONTRADICTION", "intervals")
    ]


def test_a_misspelt_backoff_strategy_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="use 'exponential'"):
        RetryPolicy(backoff_strategy="exponental")  # type: ignore[arg-type]


@pytest.mark.parametrize(("jitter", "fraction"), [(True, 0.25), (False, 0.0), (0, 0.0), (1, 1.0), (0.5, 0.5)])
def test_jitter_is_a_fraction_or_a_boolean(jitter: Any, fraction: float) -> None:
    policy = RetryPolicy(intervals=[100], jitter=jitter)
    assert policy.delay(1, FixedDice(0.0)) == 100
    assert policy.delay(1, FixedDice(1.0)) == pytest.approx(100 * (1 + fraction))


@pytest.mark.parametrize(
    ("jitter", "code"),
    [
        (-0.01, "OUT_OF_RANGE"),
        (1.01, "OUT_OF_RANGE"),
        (float("nan"), "OUT_OF_RANGE"),
        ("10%", "WRONG_TYPE"),
        (None, "WRONG_TYPE"),
    ],
)
def test_invalid_jitter_is_rejected(jitter: Any, code: str) -> None:
    assert problems_of(jitter=jitter) == [(code, "jitter")]


def test_max_delay_applies_after_the_jitter() -> None:
    policy = RetryPolicy(backoff_strategy="exponential", intervals=[60], jitter=1.0, max_delay="3m")
    assert delays(policy, dice=0.5) == [90, 180, 180]


def test_a_max_delay_below_every_interval_is_rejected() -> None:
    assert problems_of(intervals=[60], max_delay=59) == [("CONTRADICTION", "max_delay")]
    assert RetryPolicy(intervals=[60], max_delay=60).max_delay_s == 60
    assert problems_of(max_delay=0.5) == [("OUT_OF_RANGE", "max_delay")]
    assert problems_of(max_delay="366d") == [("OUT_OF_RANGE", "max_delay")]


@given(
    number=st.integers(1, 1_000),
    base=st.floats(1, 86_400),
    jitter=st.floats(0, 1),
    strategy=st.sampled_from(["fixed", "exponential"]),
    seed=st.integers(),
)
def test_a_retry_delay_is_between_the_interval_and_max_delay(
    number: int, base: float, jitter: float, strategy: Any, seed: int
) -> None:
    policy = RetryPolicy(backoff_strategy=strategy, intervals=[base], jitter=jitter, max_delay="2d")
    planned = base if strategy == "fixed" else base * 2.0 ** min(number - 1, 63)
    assert min(planned, 172_800) <= policy.delay(number, Random(seed)) <= min(planned * (1 + jitter), 172_800)


def test_jitter_is_uniform_over_its_range() -> None:
    policy = RetryPolicy(intervals=[100], jitter=0.2)
    dice = Random(7)
    drawn = [policy.delay(1, dice) for _ in range(20_000)]
    fifths = [sum(1 for delay in drawn if low <= delay < low + 4) for low in (100, 104, 108, 112, 116)]
    assert all(3_700 < count < 4_300 for count in fifths)


def test_retry_numbers_start_at_1() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        RetryPolicy().delay(0, Random(0))


def test_a_retry_beyond_the_list_uses_the_last_interval() -> None:
    assert RetryPolicy(intervals=[1, 2, 3], jitter=0).delay(9, Random(0)) == 3


def test_auto_retry_for_matches_codes_and_exception_classes() -> None:
    policy = RetryPolicy(auto_retry_for=[WORKER_CRASHED, "SMTP_DOWN", OSError])
    assert policy.matches("SMTP_DOWN", None)
    assert policy.matches(WORKER_CRASHED, None)
    assert policy.matches("UNHANDLED_EXCEPTION", ConnectionResetError())
    assert not policy.matches("UNHANDLED_EXCEPTION", ValueError())
    assert not policy.matches("UNHANDLED_EXCEPTION", None)
    assert not RetryPolicy().matches("UNHANDLED_EXCEPTION", ValueError())


@pytest.mark.parametrize("name", ["TimeoutError", "asyncio.TimeoutError", "MyException", "Retryable"])
def test_auto_retry_for_rejects_the_name_of_an_exception_class(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"pass the class itself \(" + name):
        RetryPolicy(auto_retry_for=[name])


@pytest.mark.parametrize(
    "code", ["smtp_down", "SMTP-DOWN", "", "_SMTP", "9LIVES", "SMTP DOWN", "SMTP_DOWN\n", "ÄRGER"]
)
def test_auto_retry_for_rejects_text_that_is_not_a_code(code: str) -> None:
    assert [name for _, name in problems_of(auto_retry_for=["OK", code])] == ["auto_retry_for[1]"]


@pytest.mark.parametrize("reason", [5, None, int, TimeoutError("an instance")])
def test_auto_retry_for_rejects_values_that_are_neither_code_nor_exception_class(reason: Any) -> None:
    assert problems_of(auto_retry_for=[reason]) == [("WRONG_TYPE", "auto_retry_for[0]")]


@pytest.mark.parametrize(
    ("value", "fix"), [("SMTP_DOWN", "write ['SMTP_DOWN']"), (TimeoutError, "write [TimeoutError]")]
)
def test_auto_retry_for_rejects_a_single_value_and_suggests_a_list(value: Any, fix: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        RetryPolicy(auto_retry_for=value)
    assert refusal.value.problems[0].fix == fix


def test_all_problems_of_a_retry_policy_come_in_one_error() -> None:
    found = problems_of(max_retries=99, intervals=[0], jitter=7, auto_retry_for=["x y"], max_retry=3)
    assert sorted(name for _, name in found) == [
        "auto_retry_for[0]",
        "intervals[0]",
        "jitter",
        "max_retries",
        "max_retry",
    ]


def test_retry_policies_with_equal_values_are_equal() -> None:
    first = RetryPolicy(intervals=["1m"], auto_retry_for=[OSError])
    second = RetryPolicy(intervals=(timedelta(seconds=60),), auto_retry_for=(OSError,))
    assert first == second
    assert hash(first) == hash(second)


def test_a_retry_policy_without_auto_retry_for_gives_a_warning() -> None:
    assert RetryPolicy().warnings() != []
    assert RetryPolicy(auto_retry_for=["X"]).warnings() == []
