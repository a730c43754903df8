"""The app registers tasks under unique names, checks its settings at once, and delegates all other work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everbeat import App, AsyncTask, Context, NatsConfig, QueueConfig, RecoveryConfig, SyncTask, WorkerConfig
from everbeat.app import definition_of
from everbeat.errors import ConfigurationError, RegistrationError

URL = "postgresql://localhost/never-opened"


def test_a_decorated_function_becomes_a_task_and_stays_callable() -> None:
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


def test_the_name_of_a_task_is_the_name_of_its_function() -> None:
    app = App(URL)
    assert app.task(_nameless()).name == "work"
    assert app.task(name="other.work")(_nameless()).name == "other.work"


def _nameless() -> Any:
    def work() -> None: ...

    return work


def test_a_duplicate_task_name_is_rejected_with_both_places() -> None:  # bad input: two tasks of one name
    app = App(URL)

    @app.task
    def work() -> None: ...

    with pytest.raises(RegistrationError) as refusal:

        @app.task(name="work")
        def other() -> None: ...

    assert refusal.value.message.count(__file__) == 2
    assert "another name" in str(refusal.value)
    assert list(app.tasks) == ["work"]
    App(URL).task(_nameless())  # another app has separate names


def test_all_wrong_task_options_are_reported_at_once_with_their_place() -> None:
    app = App(URL)
    with pytest.raises(ConfigurationError) as refusal:

        @app.task(quue="mail", timeout="soon", priority="high")  # type: ignore[call-overload]
        def work() -> None: ...

    text = str(refusal.value)
    assert len(refusal.value.problems) == 3
    for said in ("use queue", "TaskOptions.timeout", "TaskOptions.priority", f"{__file__}:"):
        assert said in text


def test_the_exception_codes_of_a_task_can_be_omitted() -> None:
    app = App(URL, exception_codes={ConnectionError: "DOWN"})
    app.task(exception_codes=None)(_nameless())
    assert app.exception_codes == {ConnectionError: "DOWN"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recovery": {"check_interval_ms": 1}}, "must be a RecoveryConfig"),
        ({"worker": 4}, "must be a WorkerConfig"),
        ({"queues": ["mail"]}, "QueueConfig"),
        ({"wake": NatsConfig(servers=["nats://a"], ack_wait="1s")}, "NatsConfig.ack_wait = '1s'"),
        ({"wake": "redis://a"}, "App.wake"),
        ({"schema": "no schema"}, "App.schema"),
        ({"payload_limit": "much"}, "App.payload_limit"),
        ({"patience": "long"}, "App.patience"),
        ({"queues": [QueueConfig("mail"), QueueConfig("mail", priority=1)]}, "mail more than once"),
        ({"on_crash": "retri"}, "use 'retry'"),
        ({"stall_timeout": "5 x"}, "or None, which watches no progress"),
        ({"stall_timeout": "200ms"}, "use 1s or more"),
        ({"exception_codes": {"ValueError": "X"}}, "exception class"),
        ({"auto_migrate": "no"}, "must be 'create', True or False"),
        ({"auto_migrate": 1}, "must be 'create', True or False"),
    ],
)
def test_wrong_settings_of_an_app_are_rejected_with_their_place(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refusal:
        App(URL, **settings)
    assert [str(problem.where).rpartition(":")[0] for problem in refusal.value.problems] == [__file__]


def test_an_app_opens_no_connection_before_its_first_use() -> None:
    app = App("postgresql://127.0.0.1:1/nobody-listens")
    app.task(_nameless())
    app.close()
    asyncio.run(app.aclose())
    assert "1 task" in repr(app)


def test_a_worker_definition_contains_the_settings_of_workers() -> None:
    app = App(
        URL,
        schema="shop",
        recovery=RecoveryConfig(self_fence=True),
        worker=WorkerConfig(prefetch=9),
        queues=[QueueConfig("mail", priority=3)],
    )
    app.task(_nameless())
    definition = definition_of(app, locator="shop:app", async_concurrency=7)
    assert (definition.worker.prefetch, definition.worker.async_concurrency) == (9, 7)
    assert (definition.recovery.self_fence, definition.queue_priorities) == (True, {"mail": 3})
    assert (definition.address.portable, definition.address.schema) == (URL, "shop")
    assert definition.task_process_argv()[-3:] == ("everbeat.cli.program", "task_process", "shop:app")
    with pytest.raises(ConfigurationError, match="use async_concurrency"):
        definition_of(app, async_concurency=7)  # type: ignore[call-arg]


module_app = App(URL)


def test_a_worker_can_only_serve_declared_queues() -> None:  # J9
    app = App(URL, queues=[QueueConfig("mail"), QueueConfig("films")])
    assert definition_of(app, queues=["mail", "default"]).worker.queues == ("mail", "default")
    with pytest.raises(ConfigurationError) as caught:
        definition_of(app, queues=["films", "mial"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.value, problem.fix) == ("UNKNOWN_QUEUE", "'mial'", "use 'mail'")
    assert "--queues" in problem.subject
    assert definition_of(App(URL), queues=["mial"]).worker.queues == ("mial",), (
        "an app that declares none sends to any"
    )


def test_an_app_knows_the_locator_by_which_a_new_process_finds_it() -> None:
    assert definition_of(module_app).locator == f"{__name__}:module_app"
    assert definition_of(App(URL)).locator is None


@pytest.mark.parametrize(
    ("command", "expected"), [(["shop.py"], "shop.py:app"), (["-m", "shop"], "shop:app"), (["-c"], "None")]
)
def test_a_script_knows_the_locator_of_its_app(tmp_path: Path, command: list[str], expected: str) -> None:
    source = f"from everbeat import App\nfrom everbeat.app import definition_of\napp = App({URL!r})\nprint(definition_of(app).locator)\n"
    (tmp_path / "shop.py").write_text(source)
    arguments = [*command, source] if command == ["-c"] else command
    found = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith(expected)
