"""Test the settings of `Limit`, the rates, and the limits of queues."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat import App, Limit, QueueConfig
from everbeat.domain.limit.model import LONGEST_KEY_BYTES, LimitDefinition, bounded_key, gate_of, limit_of
from everbeat.domain.limit.options import parse_rate, spelled_rate
from everbeat.domain.settings.settings import gathering
from everbeat.domain.task.policy import TaskOptions
from everbeat.errors import ConfigurationError


def problems_of(**settings: Any) -> dict[str, str]:
    """Return the codes of the problems by subject."""
    with pytest.raises(ConfigurationError) as error:
        Limit(**settings)
    return {problem.subject: problem.code for problem in error.value.problems}


def test_a_limit_is_stored_with_all_its_numbers() -> None:
    limit = Limit("stripe", concurrency=20, rate="100/10s", burst=10)
    assert limit.definition() == LimitDefinition(
        name="stripe", concurrency=20, starts=100, period_s=10.0, burst=10
    )
    fair = Limit(
        "tenant", concurrency=3, key="order.tenant", fairness="round_robin", weights={"acme": 2, 7: 3}
    )  # type: ignore[dict-item]
    assert fair.definition().weights == {"acme": 2, "7": 3}
    assert (fair.path, fair.definition().fair) == (("order", "tenant"), True)
    assert Limit("api", rate="5/m", window="sliding").definition().sliding


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100/10s", (100, 10.0)), ("5/m", (5, 60.0)), ("5/min", (5, 60.0)), ("1/1h30m", (1, 5_400.0)), (" 2 / second ", (2, 1.0)), ("5/.5s", (5, 0.5))],
)  # fmt: skip
def test_a_rate_is_a_number_of_starts_and_a_period(text: str, rate: tuple[int, float]) -> None:
    assert parse_rate(text, subject="rate") == rate


@pytest.mark.parametrize(
    "wrong", ["", "100", "100/", "/10s", "0/1s", "-5/1s", "5/0s", "5/10", "1.5/s", 7, None]
)
def test_a_wrong_rate_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="rate"):
        parse_rate(wrong, subject="rate")


@pytest.mark.parametrize(("text", "period"), [("5/-5s", "'-5s'"), ("5/- s", "'- s'")])
def test_a_wrong_period_of_a_rate_is_reported_as_it_was_written(text: str, period: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_rate(text, subject="rate")
    assert [(each.subject, each.value) for each in error.value.problems] == [("rate (period)", period)]


@given(st.integers(1, 1_000_000), st.sampled_from([0.1, 0.25, 1.0, 10.0, 90.0, 3_600.0, 86_400.0]))
def test_a_spelled_rate_can_be_read_again(starts: int, period_s: float) -> None:
    assert parse_rate(spelled_rate(starts, period_s), subject="rate") == (starts, period_s)


def test_two_weights_of_keys_with_the_same_text_are_refused() -> None:
    for weights in ({1: 1, "1": 2}, {True: 1, "true": 1}):
        with pytest.raises(ConfigurationError, match=r"more than one key with the text '(1|true)'"):
            Limit("t", concurrency=1, key="k", fairness="round_robin", weights=weights)  # type: ignore[arg-type]


def test_every_contradiction_of_a_limit_is_reported_at_once() -> None:
    assert problems_of(name="a") == {"Limit 'a'": "MISSING"}
    assert problems_of(name="a/b", concurrency=0, rate="0/1s") == {
        "Limit.name": "WRONG_NAME",
        "Limit.concurrency": "OUT_OF_RANGE",
        "Limit.rate (starts)": "OUT_OF_RANGE",
    }
    assert problems_of(name="a", concurrency=1, burst=2, fairness="round_robin", weights={"x": 0}) == {
        "Limit.weights['x']": "OUT_OF_RANGE",
        "Limit.burst": "CONTRADICTION",
        "Limit.fairness": "CONTRADICTION",
    }
    assert problems_of(name="a", concurrency=1, weights={"x": 2}) == {"Limit.weights": "CONTRADICTION"}
    assert problems_of(name="a", concurrency=1, window="sliding") == {"Limit.window": "CONTRADICTION"}
    assert problems_of(name="a", rate="5/s", window="sliding", burst=2) == {"Limit.burst": "CONTRADICTION"}
    assert problems_of(name="a", rate="1001/s", window="sliding") == {"Limit.rate": "OUT_OF_RANGE"}
    assert problems_of(name="a", rate="5/s", when_full="drop") == {"Limit.when_full": "CONTRADICTION"}
    assert problems_of(name="a", concurrency=1, key="0x") == {"Limit.key": "WRONG_KEY"}


def test_settings_of_other_systems_are_refused_with_the_name_that_everbeat_uses() -> None:
    with pytest.raises(ConfigurationError, match="use concurrency"):
        Limit("a", max_concurrency=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="costs="):
        Limit("a", concurrency=3, cost=2)  # type: ignore[call-arg]


def test_an_app_refuses_a_limit_that_is_declared_twice() -> None:
    with pytest.raises(ConfigurationError, match="names gpu more than once"):
        App("postgresql://localhost/never", limits=[Limit("gpu", concurrency=1), Limit("gpu", concurrency=2)])


def test_a_serial_queue_cannot_have_a_concurrency() -> None:
    with pytest.raises(ConfigurationError, match=r"QueueConfig\.concurrency.*one at a time"):
        QueueConfig("ledger", serial=True, concurrency=5)
    assert QueueConfig("ledger", concurrency=5).to_dict()["concurrency"] == 5


def test_options_without_an_effect_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"QueueConfig\.when_full = 'wait': has no effect"):
        QueueConfig("mail", when_full="wait")
    with pytest.raises(ConfigurationError, match=r"TaskOptions\.concurrency = 3: has no effect"):
        TaskOptions(serial=True, concurrency=3)


def test_zero_permits_in_code_name_the_call_that_pauses_a_limit() -> None:
    fix = r"concurrency = 0: .*call app\.set_limit\(NAME, concurrency=0\)"
    for make in (partial(Limit, "a"), partial(QueueConfig, "mail"), TaskOptions):
        with pytest.raises(ConfigurationError, match=fix):
            make(concurrency=0)


def test_durations_are_shown_with_their_units() -> None:
    with pytest.raises(ConfigurationError, match=r"at_latest = '5m'"):
        TaskOptions(at_latest="5m")
    with pytest.raises(ConfigurationError, match=r"keep_result_for = '1h'"):
        TaskOptions(ignore_result=True, keep_result_for=3_600)


def test_check_gathers_the_mistakes_of_limits_and_of_tasks() -> None:
    with gathering() as mistakes:
        app = App("postgresql://localhost/never", limits=[Limit("gpu")])

        @app.task(limits=["gpv"])
        def train() -> None: ...

    text = "\n".join(str(mistake.error) for mistake in mistakes)
    assert "limits nothing" in text
    assert "use 'gpu'" in text


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="\x00")))
def test_a_gate_has_the_name_of_its_limit_for_each_key(key: str) -> None:
    gate = gate_of("tenant", key)
    assert limit_of(gate) == "tenant"
    assert len(bounded_key(key).encode()) <= LONGEST_KEY_BYTES
    assert (gate == f"tenant/{key}") == (len(key.encode()) <= LONGEST_KEY_BYTES)
