"""The app registers tasks under one name each, checks its settings at once, and hands everything else to the rooms."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everbeat import (
    App,
    AsyncTask,
    ConfigurationError,
    Context,
    QueueConfig,
    RecoveryConfig,
    RegistrationError,
    SyncTask,
    WorkerConfig,
)

URL = "postgresql://localhost/never-opened"


def test_a_function_becomes_a_task_and_stays_a_function() -> None:
    app = App(URL)

    @app.task
    def add(a: int, b: int = 1) -> int:
        return a + b

    @app.task(queue="mail", timeout="30s")
    async def welcome(context: Context, user_id: int) -> str:
        return f"{user_id} in {context.queue}"

    assert isinstance(add, SyncTask)
    assert isinstance(welcome, AsyncTask)
    assert add(1, b=2) == 3
    assert asyncio.run(welcome(7)) == "7 in mail"
    assert list(app.tasks) == ["add", "welcome"]
    definition = app.tasks["welcome"]
    assert (definition.is_async, definition.run_in, definition.options.timeout_ms) == (True, "async", 30_000)
    assert definition.where.startswith(f"{__file__}:")
    assert "nobody" not in app.tasks


def test_the_name_is_the_functions_own_whatever_the_module_is_called() -> None:
    app = App(URL)
    assert app.task(_nameless()).name == "work"
    assert app.task(name="other.work")(_nameless()).name == "other.work"


def _nameless() -> Any:
    def work() -> None: ...

    return work


def test_a_name_that_is_taken_is_refused_with_both_places() -> None:  # bad input: two tasks of one name
    app = App(URL)

    @app.task
    def work() -> None: ...

    with pytest.raises(RegistrationError) as refusal:

        @app.task(name="work")
        def other() -> None: ...

    assert refusal.value.message.count(__file__) == 2
    assert "name of its own" in str(refusal.value)
    assert list(app.tasks) == ["work"]
    App(URL).task(_nameless())  # another app has names of its own


def test_wrong_options_are_all_told_at_once_with_their_place() -> None:
    app = App(URL)
    with pytest.raises(ConfigurationError) as refusal:

        @app.task(quue="mail", timeout="soon", priority="high")  # type: ignore[call-overload]
        def work() -> None: ...

    text = str(refusal.value)
    assert len(refusal.value.problems) == 3
    for said in ("use queue", "TaskOptions.timeout", "TaskOptions.priority", f"{__file__}:"):
        assert said in text


def test_exception_codes_may_be_left_out() -> None:
    app = App(URL, exception_codes={ConnectionError: "DOWN"})
    app.task(exception_codes=None)(_nameless())
    assert app.exception_codes == {ConnectionError: "DOWN"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recovery": {"check_interval_ms": 1}}, "must be a RecoveryConfig"),
        ({"worker": 4}, "must be a WorkerConfig"),
        ({"queues": ["mail"]}, "QueueConfig"),
        ({"queues": [QueueConfig("mail"), QueueConfig("mail", priority=1)]}, "mail more than once"),
        ({"on_crash": "retri"}, "use 'retry'"),
        ({"exception_codes": {"ValueError": "X"}}, "exception class"),
        ({"auto_migrate": "no"}, "must be 'create', True or False"),
        ({"auto_migrate": 1}, "must be 'create', True or False"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        App(URL, **settings)


def test_nothing_is_opened_before_the_first_use() -> None:
    app = App("postgresql://127.0.0.1:1/nobody-listens")
    app.task(_nameless())
    app.close()
    asyncio.run(app.aclose())
    assert "1 tasks" in repr(app)


def test_a_blueprint_is_what_workers_are_made_from() -> None:
    app = App(
        URL,
        schema="shop",
        recovery=RecoveryConfig(self_fence=True),
        worker=WorkerConfig(prefetch=9),
        queues=[QueueConfig("mail", priority=3)],
    )
    app.task(_nameless())
    blueprint = app.blueprint(locator="shop:app", async_concurrency=7)
    assert (blueprint.worker.prefetch, blueprint.worker.async_concurrency) == (9, 7)
    assert (blueprint.recovery.self_fence, blueprint.queue_priorities) == (True, {"mail": 3})
    assert (blueprint.address.portable, blueprint.address.schema) == (URL, "shop")
    assert blueprint.task_process_argv()[-2:] == ("everbeat.cli.task_process", "shop:app")
    with pytest.raises(ConfigurationError, match="use async_concurrency"):
        app.blueprint(async_concurency=7)  # type: ignore[call-arg]


module_app = App(URL)


def test_a_worker_serves_only_queues_that_its_app_declares() -> None:  # J9
    app = App(URL, queues=[QueueConfig("mail"), QueueConfig("films")])
    assert app.blueprint(queues=["mail", "default"]).worker.queues == ("mail", "default")
    with pytest.raises(ConfigurationError) as caught:
        app.blueprint(queues=["films", "mial"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.value, problem.fix) == ("UNKNOWN_QUEUE", "'mial'", "use 'mail'")
    assert "--queues" in problem.subject
    assert App(URL).blueprint(queues=["mial"]).worker.queues == ("mial",), (
        "an app that declares none sends to any"
    )


def test_an_app_knows_how_a_new_process_finds_it() -> None:
    assert module_app.blueprint().locator == f"{__name__}:module_app"
    assert App(URL).blueprint().locator is None


@pytest.mark.parametrize(
    ("command", "expected"), [(["shop.py"], "shop.py:app"), (["-m", "shop"], "shop:app"), (["-c"], "None")]
)
def test_a_script_finds_itself(tmp_path: Path, command: list[str], expected: str) -> None:
    source = f"from everbeat import App\napp = App({URL!r})\nprint(app.blueprint().locator)\n"
    (tmp_path / "shop.py").write_text(source)
    arguments = [*command, source] if command == ["-c"] else command
    found = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith(expected)
