"""TaskOptions, and the part of them that is stored with a task."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.task.policy import StoredPolicy, TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import TASK_STALLED, WORKER_CRASHED, ConfigurationError, PayloadError


def problems_of(**options: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigurationError) as refusal:
        TaskOptions(**options)
    return [
        (problem.code, problem.subject.removeprefix("TaskOptions.")) for problem in refusal.value.problems
    ]


def test_the_defaults_of_task_options_are_documented_values() -> None:
    options = TaskOptions()
    assert (options.name, options.queue, options.priority, options.run_in) == (None, "default", 0, None)
    assert (options.timeout_ms, options.stall_timeout_ms, options.retry, options.on_crash) == (
        None,
        None,
        None,
        None,
    )
    assert (dict(options.flag_values), dict(options.exception_codes)) == ({}, {})
    assert options.warnings() == []


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [("priority", -32_768, 32_767), ("max_crashes", 1, 100), ("max_losses", 1, 1_000)],
)
def test_numbers_in_task_options_are_bounded(name: str, lowest: int, highest: int) -> None:
    for accepted in (lowest, highest):
        assert getattr(TaskOptions(**{name: accepted}), name) == accepted
    for refused in (lowest - 1, highest + 1):
        assert problems_of(**{name: refused}) == [("OUT_OF_RANGE", name)]
    for refused_type in (True, "1", 1.0):
        assert problems_of(**{name: refused_type}) == [("WRONG_TYPE", name)]


@pytest.mark.parametrize(
    ("name", "shortest", "too_short", "longest", "too_long"),
    [("timeout", "100ms", "99ms", "365d", "366d"), ("stall_timeout", "1s", 0.999, "365d", "366d")],
)
def test_timeouts_in_task_options_are_bounded(
    name: str, shortest: Any, too_short: Any, longest: Any, too_long: Any
) -> None:
    assert TaskOptions(**{name: shortest}) != TaskOptions()
    assert TaskOptions(**{name: longest}) != TaskOptions()
    for refused in (too_short, too_long):
        assert problems_of(**{name: refused}) == [("OUT_OF_RANGE", name)]


def test_task_options_give_timeouts_in_milliseconds() -> None:
    options = TaskOptions(timeout="30s", stall_timeout=1.5)
    assert (options.timeout_ms, options.stall_timeout_ms) == (30_000, 1_500)


def test_a_stall_timeout_above_the_timeout_gives_a_warning() -> None:
    assert "stall_timeout" in TaskOptions(timeout=5, stall_timeout=5).warnings()[0]
    assert TaskOptions(timeout=5, stall_timeout=4).warnings() == []


def test_task_and_queue_names_are_checked() -> None:
    assert TaskOptions(name="mail.welcome", queue="mail").name == "mail.welcome"
    for name in ("", "a b", "x" * 201, "a\x00", "a\u200b", "\ud800"):
        assert problems_of(name=name) == [("WRONG_NAME", "name")]
    assert problems_of(queue="") == [("WRONG_NAME", "queue")]
    assert problems_of(queue=None) == [("WRONG_TYPE", "queue")]


def test_flags_are_a_list_of_names_or_a_mapping_of_names_to_booleans() -> None:
    assert TaskOptions(flags=["a"]) == TaskOptions(flags={"a": True})
    assert problems_of(flags="a") == [("WRONG_TYPE", "flags")]
    assert problems_of(flags={"b": True, "a": 1, "c d": True}) == [
        ("WRONG_TYPE", "flags['a']"),
        ("WRONG_NAME", "flags['c d']"),
    ]
    assert problems_of(flags=["a", ""]) == [("WRONG_NAME", "flags[1]")]


def test_flags_of_task_options_are_an_immutable_copy() -> None:
    given_flags = {"a": True}
    options = TaskOptions(flags=given_flags)
    given_flags["a"] = False
    assert options.flag_values["a"] is True
    with pytest.raises(TypeError):
        options.flag_values["a"] = False  # type: ignore[index]


def test_exception_codes_map_classes_to_codes() -> None:
    assert dict(TaskOptions(exception_codes={OSError: "DISK"}).exception_codes) == {OSError: "DISK"}
    assert problems_of(exception_codes={"OSError": "DISK"}) == [("WRONG_TYPE", "exception_codes['OSError']")]
    assert problems_of(exception_codes={OSError: "disk"}) == [("WRONG_NAME", "exception_codes[OSError]")]
    assert problems_of(exception_codes=[OSError]) == [("WRONG_TYPE", "exception_codes")]


def test_the_retry_option_must_be_a_retry_policy() -> None:
    assert problems_of(retry={"max_retries": 3}) == [("WRONG_TYPE", "retry")]
    assert problems_of(retry=3) == [("WRONG_TYPE", "retry")]


def test_on_crash_fail_contradicts_a_retry_policy_that_lists_the_crash() -> None:
    listed = RetryPolicy(auto_retry_for=[WORKER_CRASHED])
    assert problems_of(on_crash="fail", retry=listed) == [("CONTRADICTION", "on_crash")]
    assert TaskOptions(on_crash="retry", retry=listed).on_crash == "retry"
    assert TaskOptions(retry=listed).on_crash is None
    with pytest.raises(ConfigurationError, match="WORKER_CRASHED"):
        TaskOptions(retry=listed).replace(on_crash="fail")


def test_all_problems_of_task_options_come_in_one_error_with_their_place() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        TaskOptions(queue="a b", priority=1.5, run_in="thred", on_crash="ignore", timout=3)  # type: ignore[call-arg, arg-type]
    assert [problem.subject for problem in refusal.value.problems] == [
        f"TaskOptions.{name}" for name in ("timout", "queue", "priority", "run_in", "on_crash")
    ]
    assert all(Path(__file__).name in str(problem.where) for problem in refusal.value.problems)
    assert "use timeout" in str(refusal.value)
    assert "use 'thread'" in str(refusal.value)


def test_a_task_with_default_options_stores_no_policy() -> None:
    assert TaskOptions().stored(on_crash="fail").to_json() is None
    assert StoredPolicy.from_json(None) == StoredPolicy()
    assert StoredPolicy().delay(1, Random(0)) == 0


def test_the_stored_policy_contains_what_recovery_needs() -> None:
    options = TaskOptions(
        timeout="30s",
        max_crashes=5,
        retry=RetryPolicy(
            max_retries=2, intervals=[10, "1m"], jitter=0, auto_retry_for=[WORKER_CRASHED, TASK_STALLED]
        ),
    )
    stored = options.stored(on_crash="fail")
    assert stored == StoredPolicy(
        max_retries=2,
        intervals=(10.0, 60.0),
        retry_for=("WORKER_CRASHED", "TASK_STALLED"),
        max_crashes=5,
        timeout_ms=30_000,
    )
    assert [stored.delay(number, Random(0)) for number in (1, 2)] == [10, 60]


def test_the_on_crash_default_of_the_app_applies_to_tasks_without_one() -> None:
    assert TaskOptions().stored(on_crash="retry").on_crash == "retry"
    assert TaskOptions(on_crash="fail").stored(on_crash="retry").on_crash == "fail"


def test_the_stall_timeout_of_the_app_applies_to_tasks_without_one() -> None:  # G2
    def stored(**own: Any) -> int | None:
        return TaskOptions(**own).stored(on_crash="fail", stall_timeout_ms=300_000).stall_timeout_ms

    assert (stored(), stored(stall_timeout=None)) == (300_000, 300_000)
    assert stored(stall_timeout="10s") == 10_000
    assert stored(stall_timeout="never") is None
    assert TaskOptions().stored(on_crash="fail").stall_timeout_ms is None


def test_a_misspelt_stall_timeout_is_rejected_with_the_accepted_word() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        TaskOptions(stall_timeout="nevr")
    (problem,) = refusal.value.problems
    assert problem.code == "DURATION_INVALID"
    assert '"never", which watches no progress' in problem.fix
    assert problem.fix.endswith("or None, which takes the app's default")


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        ("good_until", "with_options(good_until=...)"),
        ("job_key", "with_options(key=...)"),
        ("run_at", "task.schedule("),
        ("retry_policy", "use retry"),
        ("max_attempts", "RetryPolicy(max_retries=...)"),
    ],
)
def test_an_option_that_belongs_elsewhere_is_rejected_with_its_place(theirs: str, instead: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        TaskOptions(**{theirs: 1})
    (problem,) = refusal.value.problems
    assert (problem.code, problem.rule) == ("UNKNOWN_NAME", "is not an option of a task function")
    assert instead in problem.fix


def test_a_stored_policy_omits_defaults() -> None:
    assert TaskOptions(on_crash="retry").stored(on_crash="fail").to_json() == b'{"on_crash":"retry"}'


@given(
    st.builds(
        StoredPolicy,
        max_retries=st.integers(0, 20),
        strategy=st.sampled_from(["fixed", "exponential"]),
        intervals=st.lists(st.floats(1, 86_400), max_size=20).map(tuple),
        jitter=st.floats(0, 1),
        max_delay=st.none() | st.floats(1, 86_400),
        retry_for=st.lists(st.sampled_from(["WORKER_CRASHED", "TASK_STALLED", "builtins.OSError"])).map(
            tuple
        ),
        on_crash=st.sampled_from(["fail", "retry"]),
        max_crashes=st.none() | st.integers(1, 100),
        max_losses=st.none() | st.integers(1, 1_000),
        timeout_ms=st.none() | st.integers(100, 10**10),
        stall_timeout_ms=st.none() | st.integers(1_000, 10**10),
    )
)
def test_a_stored_policy_survives_json(policy: StoredPolicy) -> None:
    assert StoredPolicy.from_json(policy.to_json()) == policy


def test_a_stored_policy_ignores_unknown_names_and_rejects_damaged_json() -> None:
    assert StoredPolicy.from_json(b'{"max_retries":2,"brand_new":1}') == StoredPolicy(max_retries=2)
    for damaged in (b"{", b'{"max_retries":"2"}', b'{"on_crash":"maybe"}', b"[]", b"\xff", "\ud800"):
        with pytest.raises(PayloadError, match="stored policy"):
            StoredPolicy.from_json(damaged)
