"""Test `everbeat check`, which reports every mistake with its place."""

from __future__ import annotations

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from tests.cli.conftest import Command

MISTAKES = """
    from everbeat import App, QueueConfig, RecoveryConfig, RetryPolicy, WorkerConfig

    app = App(
        "postgresql://localhost/shop",
        recovery=RecoveryConfig(running_stale_threshold_ms=30_000, check_intervall_ms=5),
        worker=WorkerConfig(grace="soon"),
        queues=[QueueConfig("mail", priority=1000)],
        on_crash="explode",
    )
    other = App("postgresql://localhost/shop")

    @app.task(priority="high", queue="mial", timout="5s")
    async def welcome(user_id: int) -> None: ...

    @app.task
    def unsendable(number: complex) -> None: ...

    @app.task
    def twice(x: int) -> None: ...

    @app.task(name="twice")
    def again(x: int) -> None: ...

    @other.task(name="twice", retry=RetryPolicy(max_retries=50))
    def shared(x: int) -> None: ...

    again.with_options(priority=3)  # what could not be registered must not hide what follows

    def later():
        @app.task
        def unseen(x: int) -> None: ...

    if __name__ == "__main__":
        @app.task()
        def guarded(x: int) -> None: ...
"""


def test_check_reports_every_mistake_with_file_and_line(everbeat: Command) -> None:  # A8
    module = everbeat.write("wrong.py", MISTAKES)
    lines = module.read_text().splitlines()
    answer = everbeat("check", "wrong:app", "--json").assert_code(ExitCode.FAILED)
    assert answer.document["ok"] is False
    found = {(problem["code"], problem["where"]) for problem in answer.document["problems"]}
    by_line = {where: code for code, where in found}
    assert len(answer.document["problems"]) == 14

    def place(text: str) -> str:
        return f"{module}:{next(number for number, line in enumerate(lines, 1) if text in line)}"

    assert ("UNKNOWN_NAME", place("check_intervall_ms")) in found
    assert ("THRESHOLD_TOO_LOW", place("check_intervall_ms")) in found
    assert by_line[place("WorkerConfig(grace")] == "DURATION_INVALID"
    assert by_line[place("QueueConfig(")] == "OUT_OF_RANGE"
    assert {code for code, where in found if where == place('priority="high"')} == {
        "UNKNOWN_NAME",
        "UNKNOWN_QUEUE",
        "WRONG_TYPE",
    } or ("UNKNOWN_QUEUE", place('priority="high"')) in found
    assert (
        "REGISTRATION_INVALID",
        f"{module}:{lines.index('def unsendable(number: complex) -> None: ...')}",
    ) in found
    assert ("REGISTRATION_INVALID", place('@app.task(name="twice")')) in found
    assert ("TASK_NAME_SHARED", place("@other.task")) in found
    assert ("OUT_OF_RANGE", place("@other.task")) in found
    assert ("NEVER_REGISTERED", place("    @app.task()")) in found
    assert [where for code, where in found if code == "NEVER_REGISTERED"].__len__() == 2
    assert all(problem["fix"] for problem in answer.document["problems"])


def test_check_prints_mistakes_with_relative_paths(everbeat: Command) -> None:  # A8
    everbeat.write("wrong.py", MISTAKES)
    answer = everbeat("check", "wrong:app").assert_code(ExitCode.FAILED)
    assert "wrong.py:6: error: RecoveryConfig.check_intervall_ms = 5:" in answer.out
    assert "fix: use check_interval_ms." in answer.out
    assert "14 errors" in answer.err


def test_check_reports_that_a_correct_app_has_no_errors(everbeat: Command) -> None:  # A8
    answer = everbeat("check", "shop:app").assert_code(0)
    assert answer.out == ""
    assert "shop:app has no errors: 1 app, 4 tasks" in answer.err
    document = everbeat("check", "shop.py", "--json").assert_code(0).document
    assert document["ok"] is True
    assert document["apps"][0]["tasks"] == ["welcome", "refuse", "slow", "step"]


def test_check_exits_with_zero_if_it_finds_only_warnings(everbeat: Command) -> None:
    everbeat.write(
        "odd.py",
        """
        from everbeat import App, WorkerConfig
        app = App("postgresql://localhost/shop", worker=WorkerConfig(queues=["mail"]))

        @app.task(queue="films")
        def render(film: str) -> None: ...
        """,
    )
    answer = everbeat("check", "odd").assert_code(0)
    assert "odd.py:5: warning: Task 'render' goes to queue 'films'" in answer.out


def test_check_warns_about_on_stop_fail_tasks_that_can_outlast_the_grace_period(
    everbeat: Command,
) -> None:  # J1
    (everbeat.folder / "deploy.py").write_text(
        """from everbeat import App

app = App("postgresql:///none")

@app.task(on_crash="fail")
def endless() -> None: ...

@app.task(on_crash="fail", timeout="1m")
def long() -> None: ...

@app.task(on_crash="fail", timeout="10s")
def short() -> None: ...

@app.task(on_crash="fail", on_stop="retry")
def again() -> None: ...

@app.task
def silent() -> None: ...
"""
    )
    found = everbeat("check", "deploy:app", "--json").assert_code(0).document["warnings"]
    assert {each["message"].split("'")[1] for each in found if each["code"] == "OUTLASTS_GRACE"} == {
        "endless",
        "long",
    }


def test_check_reports_mistakes_before_a_line_that_raises(everbeat: Command) -> None:
    everbeat.write(
        "broken.py",
        """
        from everbeat import App, RecoveryConfig
        recovery = RecoveryConfig(check_interval_ms=1)
        app = App("postgresql://localhost/shop", recovery=recovery)
        raise ValueError("boom")
        """,
    )
    answer = everbeat("check", "broken:app").assert_code(ExitCode.FAILED)
    assert "broken.py:3: error: RecoveryConfig.check_interval_ms = 1" in answer.out
    assert "broken.py:5: error: Importing 'broken' failed with ValueError: boom" in answer.out


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(:\n", "broken.py:1: error: Importing 'broken' failed with SyntaxError"),
        ("import nowhere\n", "broken.py:1: error: Importing 'broken' failed with ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "broken.py:1: error: Importing 'broken' failed with SystemExit: 3"),
        ("from everbeat import App\napp = App('mysql://x')\n", "broken.py:2: error: The database URL"),
    ],
)
def test_check_reports_a_module_that_cannot_be_imported(everbeat: Command, code: str, expected: str) -> None:
    everbeat.write("broken.py", code)
    assert expected in everbeat("check", "broken").assert_code(ExitCode.FAILED).out


def test_check_finds_mistakes_in_imported_modules(everbeat: Command) -> None:
    everbeat.write("pack/__init__.py", "")
    everbeat.write("pack/app.py", "from everbeat import App\napp = App()\nimport pack.tasks\n")
    everbeat.write(
        "pack/tasks.py",
        "from pack.app import app\n\n@app.task(priority=1e9)\ndef f() -> None: ...\n\ndef g():\n    @app.task\n    def h(): ...\n",
    )
    out = everbeat("check", "pack.app:app").assert_code(ExitCode.FAILED).out
    assert "pack/tasks.py:3: error: TaskOptions.priority" in out
    assert "pack/tasks.py:7: error: Workers cannot run function 'h'" in out


def test_check_exits_with_not_found_for_an_unknown_app(everbeat: Command) -> None:
    answer = everbeat("check", "shp:app").assert_code(ExitCode.NOT_FOUND)
    assert "'shop'" in answer.err
    answer = everbeat("check", "shop:ap").assert_code(ExitCode.NOT_FOUND)
    assert "shop:app" in answer.err


def test_check_reports_an_outdated_schema_unless_the_app_upgrades_it(  # J3
    everbeat: Command, database_url: str, schema: str
) -> None:
    App(database_url, schema=schema).migrate(to=10)
    for given, severity, code in (
        ("True", "warning", 0),
        ("False", "error", ExitCode.FAILED),
        ("'create'", "error", ExitCode.FAILED),
    ):
        everbeat.write(
            "prog.py",
            f"from everbeat import App\napp = App(schema={schema!r}, auto_migrate={given})\n\n@app.task\ndef work() -> None: ...\n",
        )
        out = everbeat("check", "prog:app", "--live").assert_code(code).out
        assert f"{severity}: The schema {schema!r}" in out
        assert "everbeat migrate" in out


def test_check_live_queries_the_database(everbeat: Command) -> None:
    answer = everbeat("check", "shop:app", "--live").assert_code(0)
    assert "warning" in answer.out
    assert "everbeat migrate" in answer.out
    everbeat("migrate").assert_code(0)
    answer = everbeat("check", "shop:app", "--live").assert_code(0)
    assert answer.out == ""
    assert "the database answers" in answer.err
    nowhere = "postgresql://127.0.0.1:1/nowhere"
    answer = everbeat("check", "shop:app", "--live", EVERBEAT_DATABASE_URL=nowhere)
    assert "cannot be reached" in answer.assert_code(ExitCode.FAILED).out


def test_check_warns_about_policies_that_another_setting_overrides(everbeat: Command) -> None:
    everbeat.write(
        "near.py",
        """
        from everbeat import App, RetryPolicy
        LISTED = RetryPolicy(max_retries=4, auto_retry_for=["WORKER_CRASHED"])
        STALLS = RetryPolicy(max_retries=2, auto_retry_for=["TASK_STALLED"])
        app = App("postgresql:///none", on_crash="retry")

        @app.task(retry=LISTED)
        def by_default() -> None: ...

        @app.task(retry=LISTED, on_crash="retry")
        def by_itself() -> None: ...

        @app.task(retry=STALLS)
        def stalls() -> None: ...

        @app.task(retry=RetryPolicy(auto_retry_for=["SMTP_DOWN"]))
        def plain() -> None: ...
        """,
    )
    found = everbeat("check", "near:app", "--json").assert_code(0).document["warnings"]
    told = {each["message"].split("'")[1]: each for each in found if each["code"] == "SEVERAL_POLICIES"}
    assert set(told) == {"by_default", "by_itself", "stalls"}
    assert "at most 4 times" in told["by_default"]["message"]
    assert "after 4 retries" in told["by_itself"]["message"]
    assert "TASK_STALLED" in told["stalls"]["message"]
    assert all(each["fix"] and each["where"] for each in told.values())


def test_check_reports_unsuitable_resources_and_middleware_and_names_the_tasks_that_async_middleware_skips(
    everbeat: Command,
) -> None:
    module = everbeat.write(
        "around.py",
        """
        from everbeat import App

        app = App("postgresql://localhost/shop")

        @app.around_run
        async def trace(ctx):
            yield

        @app.around_run
        def everywhere(ctx):
            yield

        @app.task
        def pack() -> None: ...

        @app.task
        async def send() -> None: ...
        """,
    )
    (found,) = everbeat("check", "around:app", "--json").assert_code(ExitCode.OK).document["warnings"]
    assert found["code"] == "MIDDLEWARE_SKIPS"
    assert "middleware 'trace' is async, so it does not run around 1 sync task: pack." in found["message"]
    assert found["where"] == f"{module}:6"

    everbeat.write(
        "wrong.py",
        """
        from everbeat import App

        app = App("postgresql://localhost/shop")

        @app.resource
        def pool() -> int:
            return 1

        @app.around_run
        def without_context():
            yield

        @app.around_send
        async def waits(call): ...

        print(pool.value)
        """,
    )
    problems = everbeat("check", "wrong:app", "--json").assert_code(ExitCode.FAILED).document["problems"]
    assert [each["code"] for each in problems] == ["REGISTRATION_INVALID"] * 3
    assert all(each["where"] for each in problems)
