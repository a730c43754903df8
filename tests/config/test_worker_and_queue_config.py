"""Test WorkerConfig and QueueConfig: bounds, nearest names, and one error for all problems."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from everbeat.config import QueueConfig, WorkerConfig, WorkerSettings
from everbeat.errors import ConfigurationError


def problems_of(build: Any, *values: Any, **settings: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigurationError) as refusal:
        build(*values, **settings)
    return [(problem.code, problem.subject.partition(".")[2]) for problem in refusal.value.problems]


def test_a_queue_has_the_lowest_priority_by_default() -> None:
    assert QueueConfig("mail") == QueueConfig(name="mail", priority=100)


@pytest.mark.parametrize("priority", [0, 101, -1, True, "1", 1.0])
def test_a_queue_priority_outside_1_to_100_is_refused(priority: Any) -> None:
    assert [name for _, name in problems_of(QueueConfig, "mail", priority=priority)] == ["priority"]


@pytest.mark.parametrize("priority", [1, 100])
def test_a_queue_priority_of_1_and_100_is_accepted(priority: int) -> None:
    assert QueueConfig("mail", priority=priority).priority == priority


@pytest.mark.parametrize("name", ["mail", "m", "a.b-c_D9", "x" * 63])
def test_a_queue_name_can_contain_letters_digits_dots_underscores_and_hyphens(name: str) -> None:
    assert QueueConfig(name).name == name


@pytest.mark.parametrize("name", ["", "x" * 64, "a b", "mail\n", "ä", "a/b", "a\x00b", "\ud800", 5, None])
def test_an_invalid_queue_name_is_refused(name: Any) -> None:
    assert [subject for _, subject in problems_of(QueueConfig, name)] == ["name"]


def test_a_queue_without_a_name_and_with_a_surplus_value_are_refused() -> None:
    assert problems_of(QueueConfig) == [("MISSING", "name")]
    assert problems_of(QueueConfig, "mail", 5) == [("UNNAMED_VALUE", "")]
    assert problems_of(QueueConfig, priorty=0, priority=0) == [
        ("UNKNOWN_NAME", "priorty"),
        ("MISSING", "name"),
        ("OUT_OF_RANGE", "priority"),
    ]


def test_worker_config_has_the_documented_defaults() -> None:
    config = WorkerConfig()
    assert (config.processes, config.async_concurrency, config.thread_concurrency) == (1, 100, 32)
    assert config.process_concurrency == len(os.sched_getaffinity(0))
    assert (config.prefetch, config.queues) == (1_000, None)
    assert (config.grace_s, config.poll_interval_s) == (25.0, 2.0)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("processes", 1, 1_024),
        ("async_concurrency", 0, 100_000),
        ("thread_concurrency", 0, 10_000),
        ("process_concurrency", 0, 1_024),
        ("prefetch", 0, 10_000),
    ],
)
def test_the_counts_of_worker_config_accept_their_bounds_and_refuse_values_beyond(
    name: str, lowest: int, highest: int
) -> None:
    for accepted in (lowest, highest):
        assert getattr(WorkerConfig(**{name: accepted}), name) == accepted
    for refused in (lowest - 1, highest + 1):
        assert problems_of(WorkerConfig, **{name: refused}) == [("OUT_OF_RANGE", name)]


@pytest.mark.parametrize(
    ("grace", "seconds"), [("30s", 30), (0, 0), (timedelta(minutes=1), 60), ("1d", 86_400)]
)
def test_the_grace_period_accepts_durations(grace: Any, seconds: float) -> None:
    assert WorkerConfig(grace=grace).grace_s == seconds


@pytest.mark.parametrize("grace", [-1, "25h", "soon", True, None])
def test_an_invalid_grace_period_is_refused(grace: Any) -> None:
    assert [name for _, name in problems_of(WorkerConfig, grace=grace)] == ["grace"]


def test_the_poll_interval_is_100_ms_to_5_minutes() -> None:
    assert WorkerConfig(poll_interval="100ms").poll_interval_s == 0.1
    assert WorkerConfig(poll_interval="5m").poll_interval_s == 300
    assert problems_of(WorkerConfig, poll_interval="99ms") == [("OUT_OF_RANGE", "poll_interval")]
    assert problems_of(WorkerConfig, poll_interval=300.001) == [("OUT_OF_RANGE", "poll_interval")]


def test_the_queues_of_worker_config_must_be_distinct_names() -> None:
    assert WorkerConfig(queues=["a", "b"]).queues == ("a", "b")
    assert problems_of(WorkerConfig, queues="mail") == [("WRONG_TYPE", "queues")]
    assert problems_of(WorkerConfig, queues=[]) == [("WRONG_COUNT", "queues")]
    assert problems_of(WorkerConfig, queues=["a", "b c"]) == [("WRONG_NAME", "queues[1]")]
    assert problems_of(WorkerConfig, queues=["a", "b", "a"]) == [("DUPLICATE", "queues")]


@pytest.mark.parametrize("slot", [None, "web-0", "a.b_C", "x" * 63])
def test_a_slot_name_follows_the_rules_of_queue_names(slot: str | None) -> None:
    assert WorkerConfig(slot=slot).slot == slot
    assert WorkerConfig.from_dict(WorkerConfig(slot=slot).to_dict()).slot == slot


@pytest.mark.parametrize("slot", ["", "x" * 64, "web 0", "web/0", 0, "w\x00"])
def test_an_invalid_slot_name_is_refused(slot: Any) -> None:
    assert [name for _, name in problems_of(WorkerConfig, slot=slot)] == ["slot"]


def test_a_worker_without_slots_is_refused_and_without_slots_of_one_mode_is_a_warning() -> None:
    none = {"async_concurrency": 0, "thread_concurrency": 0, "process_concurrency": 0}
    assert problems_of(WorkerConfig, **none) == [("CONTRADICTION", "")]
    (warning,) = WorkerConfig(process_concurrency=0).warnings()
    assert "process_concurrency" in warning


def test_an_unknown_worker_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="use thread_concurrency"):
        WorkerConfig(threads_concurrency=3)  # type: ignore[call-arg]


def test_worker_config_and_queue_config_round_trip_through_json() -> None:
    for config in (
        WorkerConfig(
            processes=3, queues=("a", "b"), grace="1m30s", poll_interval=timedelta(milliseconds=250)
        ),
        QueueConfig("mail", priority=7),
    ):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_run_worker_takes_every_worker_setting_except_processes() -> None:
    settings = {each.name for each in fields(WorkerConfig)}
    assert set(WorkerSettings.__annotations__) == settings - {"processes"}
