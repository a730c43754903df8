"""Test the app's default retry policy: send, then task, then app."""

from __future__ import annotations

import pytest

from everbeat import WORKER_CRASHED, App, RetryPolicy
from everbeat.cli.check import _warnings
from everbeat.errors import ConfigurationError

DEFAULT = RetryPolicy(max_retries=7, auto_retry_for=[WORKER_CRASHED, "WORKER_STOPPED", TimeoutError])
OWN = RetryPolicy(max_retries=2, auto_retry_for=["SMTP_DOWN"])


def test_the_send_decides_before_the_task_and_the_task_before_the_app() -> None:
    app = App("postgresql://nowhere.example", retry=DEFAULT)

    @app.task
    def plain() -> None: ...

    @app.task(retry=OWN)
    def own() -> None: ...

    @app.task(retry=None)
    def never() -> None: ...

    retries = {name: each.options.retry for name, each in app.tasks.items()}
    assert retries == {"plain": DEFAULT, "own": OWN, "never": None}
    assert plain.with_options(retry=None)._settings.retry is None
    assert plain.with_options(retry=OWN)._settings.retry == OWN
    assert never.with_options(retry=OWN)._settings.retry == OWN


def test_a_task_that_must_fail_removes_the_code_from_the_policy_of_the_app() -> None:
    app = App("postgresql://nowhere.example", retry=DEFAULT)

    @app.task(on_crash="fail")
    def charge() -> None: ...

    @app.task(on_crash="fail", on_stop="fail")
    def refund() -> None: ...

    retries = {name: each.options.retry for name, each in app.tasks.items()}
    assert retries["charge"] == DEFAULT.replace(auto_retry_for=["WORKER_STOPPED", TimeoutError])
    assert retries["refund"] == DEFAULT.replace(auto_retry_for=[TimeoutError])
    with pytest.raises(ConfigurationError, match="contradicts WORKER_CRASHED"):
        app.task(on_crash="fail", retry=DEFAULT)


def test_a_default_retry_policy_of_the_wrong_type_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"App\.retry"):
        App("postgresql://nowhere.example", retry=3)  # type: ignore[arg-type]


def test_check_does_not_warn_about_a_policy_that_on_crash_has_emptied() -> None:
    app = App(
        "postgresql://nowhere.example", retry=RetryPolicy(max_retries=2, auto_retry_for=[WORKER_CRASHED])
    )

    @app.task(on_crash="fail")
    def charge() -> None: ...

    assert app.tasks["charge"].options.retry == RetryPolicy(max_retries=2)
    assert not any("auto_retry_for is empty" in each.message for each in _warnings({"app": app}))


def test_check_warns_once_about_a_default_policy_that_retries_nothing() -> None:
    app = App("postgresql://nowhere.example", retry=RetryPolicy())

    @app.task
    def first() -> None: ...

    @app.task(retry=RetryPolicy(max_retries=2))
    def second() -> None: ...

    found = [each.message for each in _warnings({"app": app}) if "auto_retry_for is empty" in each.message]
    assert [message.partition(":")[0] for message in found] == ["App 'app'", "Task 'second'"]
