"""Test schedules that code declares: the checks at import, and the declaration that workers send."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everbeat import App, Context, QueueConfig, Schedule
from everbeat.app import definition_of
from everbeat.client.schedules import ScheduleOptions
from everbeat.domain.schedule.model import Declared, Definition
from everbeat.domain.settings.settings import gathering
from everbeat.errors import ConfigurationError, RegistrationError
from tests.docs.tables import table

NOWHERE = "postgresql://nobody@localhost/nothing"
MONDAY = datetime(2030, 1, 7, tzinfo=UTC)


def app_of(**settings: Any) -> App:
    return App(NOWHERE, **settings)


def declared(app: App) -> Declared:
    found = definition_of(app).schedules
    assert found is not None
    return found


def codes_of(error: pytest.ExceptionInfo[ConfigurationError]) -> dict[str, str]:
    return {problem.subject: problem.code for problem in error.value.problems}


def test_a_decorated_task_is_declared_and_stays_the_task() -> None:
    app = app_of(name="shop", on_crash="retry")

    @app.schedule("nightly", cron="30 2 * * *", timezone="Europe/Berlin", note="asked by ann")
    @app.schedule("hourly", every="1h", overlap="skip", expires="30m")
    @app.task(queue="reports", priority=3)
    def report(ctx: Context, kind: str = "sales") -> None: ...

    assert report is not None
    assert report.name == "report"
    assert sorted(app.schedules) == ["hourly", "nightly"]
    found = declared(app)
    hourly, nightly = found.schedules
    assert (found.owner, hourly.name, nightly.name) == ("shop", "hourly", "nightly")
    assert (hourly.rule.overlap, hourly.rule.expires_ms) == ("skip", 1_800_000)
    assert (nightly.rule.timing.timezone, nightly.note) == ("Europe/Berlin", "asked by ann")
    assert (nightly.call.task, nightly.call.queue, nightly.call.priority) == ("report", "reports", 3)
    assert msgspec.json.decode(nightly.call.args) == {}
    assert msgspec.json.decode(nightly.call.policy or "{}")["on_crash"] == "retry"


def test_a_call_is_declared_with_its_arguments_and_options() -> None:
    app = app_of()

    @app.task
    def digest(user_id: int, *, locale: str = "en") -> None: ...

    made = app.schedule("digest-42", digest.with_options(queue="mail", key="d42").call(42), every="1h")
    assert isinstance(made, Schedule)
    assert app.schedules["digest-42"] is made
    assert repr(made) == "<Schedule 'digest-42' of task 'digest': every 1h>"
    call = declared(app).schedules[0].call
    assert (call.queue, call.key, msgspec.json.decode(call.args)) == ("mail", "d42", {"user_id": 42})


def test_a_task_that_needs_arguments_is_rejected_where_it_is_decorated() -> None:
    app = app_of()
    with pytest.raises(
        RegistrationError, match=r"sends task 'digest' without arguments.*digest\.call"
    ) as error:

        @app.schedule("digest", every="1h")
        @app.task
        def digest(user_id: int) -> None: ...

    assert error.value.where is not None
    assert error.value.where.startswith(__file__)
    assert not app.schedules


def test_a_function_below_the_decorator_must_be_a_task() -> None:
    app = app_of()
    with pytest.raises(RegistrationError, match=r"is not a task.*above @app\.task"):

        @app.task
        @app.schedule("report", every="1h")  # type: ignore[type-var]
        def report() -> None: ...


def test_two_schedules_with_one_name_are_rejected_with_both_places() -> None:
    app = app_of()

    @app.task
    def report() -> None: ...

    app.schedule("report", report.call(), every="1h")
    with pytest.raises(RegistrationError, match=r"already declared, at .*test_schedule_declarations\.py:\d+"):
        app.schedule("report", report.call(), every="2h")


def test_all_problems_of_a_schedule_are_in_one_error() -> None:
    app = app_of()

    @app.task
    def report() -> None: ...

    with pytest.raises(ConfigurationError) as error:
        app.schedule(
            "two words",
            report.with_options(good_until=MONDAY).call(),
            every="0s",
            timezone="Europe/Berlln",
            overlap="skipp",  # type: ignore[arg-type]
            most=0,
            queue="mail",  # type: ignore[call-overload]
            note="",
        )
    assert codes_of(error) == {
        "name of the schedule": "WRONG_NAME",
        "good_until of task 'report'": "CONTRADICTION",
        "Schedule.queue": "UNKNOWN_NAME",
        "Schedule.every": "OUT_OF_RANGE",
        "Schedule.timezone": "TIMEZONE_UNKNOWN",
        "Schedule.overlap": "UNKNOWN_CHOICE",
        "Schedule.most": "OUT_OF_RANGE",
        "Schedule.note": "WRONG_NAME",
    }
    assert "with_options(queue=...)" in str(error.value)
    assert 'expires="1h"' in str(error.value)
    assert not app.schedules


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tz", "timezone"),
        ("interval", "every"),
        ("crontab", "cron"),
        ("max_instances", "overlap"),
        ("evry", "every"),
    ],
)
def test_an_option_of_another_scheduler_is_rejected_with_the_everbeat_option(name: str, fix: str) -> None:
    app = app_of()

    @app.task
    def report() -> None: ...

    with pytest.raises(ConfigurationError) as error:
        Schedule("report", report.call(), every="1h", **{name: "5"})  # type: ignore[typeddict-item]
    (problem,) = error.value.problems
    assert fix in problem.fix


def test_a_call_must_be_a_call_of_a_task_without_a_connection() -> None:
    app = app_of()

    @app.task
    def report() -> None: ...

    with pytest.raises(ConfigurationError, match="must be a call of a task, not of type SyncTask"):
        Schedule("report", report, every="1h")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="transaction of a connection"):
        Schedule("report", report.with_options(connection=object()).call(), every="1h")


@pytest.mark.parametrize("overlap", ["buffer_one", "buffer_all"])
def test_runs_cannot_wait_in_two_serial_lines(overlap: Any) -> None:
    app = app_of(queues=[QueueConfig("default"), QueueConfig("narrow", serial=True)])

    @app.task
    def report() -> None: ...

    with pytest.raises(ConfigurationError, match="one line only"):
        Schedule("a", report.with_options(serial="tenant-1").call(), every="1h", overlap=overlap)
    with pytest.raises(ConfigurationError, match="one line only"):
        app.schedule("b", report.with_options(queue="narrow").call(), every="1h", overlap=overlap)
    app.schedule("c", report.with_options(queue="narrow").call(), every="1h", overlap="skip")


def test_a_queue_that_the_app_does_not_declare_is_rejected() -> None:
    app = app_of(queues=[QueueConfig("mail")])

    @app.task
    def report() -> None: ...

    with pytest.raises(ConfigurationError, match="is not one of the queues"):
        app.schedule("report", report.with_options(queue="mial").call(), every="1h")


def test_a_check_gathers_the_mistakes_of_all_schedules() -> None:
    with gathering() as mistakes:
        app = app_of()

        @app.schedule("a", every="nonsense")
        @app.schedule("b", cron="61 * * * *")
        @app.task
        def report() -> None: ...

        @app.schedule("c", every="1h")
        @app.task(run_in="async")
        def wrong() -> None: ...

        app.schedule("d", report.call(), every="1h")
    assert [type(each.error) for each in mistakes] == [
        ConfigurationError,
        ConfigurationError,
        RegistrationError,
    ]
    assert list(app.schedules) == ["d"]


def some_app(every: str, *, name: str = "shop", backward: bool = False) -> App:
    app = app_of(name=name)

    @app.task
    def report(kind: str = "sales") -> None: ...

    names = ["a", "b"]
    for each in reversed(names) if backward else names:
        app.schedule(each, report.call(), every=every)
    return app


def test_the_same_schedules_have_the_same_version_in_any_order() -> None:
    versions = [
        declared(some_app("1h")).version,
        declared(some_app("1h", backward=True)).version,
        declared(some_app("1h", name="other")).version,
    ]
    assert len(set(versions)) == 1
    assert declared(some_app("2h")).version not in versions


def test_the_version_is_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from tests.client.test_schedule_declarations import declared, some_app;"
        "print(declared(some_app('1h')).version)"
    )
    root = Path(__file__).parents[2]
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}:{root / 'src'}", "PATH": ""},
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert printed == [declared(some_app("1h")).version] * 2


def test_an_app_without_schedules_declares_nothing() -> None:
    assert definition_of(app_of()).schedules is None


def test_a_declaration_survives_the_journey_to_the_supervisor() -> None:
    app = app_of(name="shop")

    @app.task
    def report(moment: datetime) -> None: ...

    app.schedule(
        "once", report.call(MONDAY), at=[MONDAY, MONDAY + timedelta(days=1)], ends=MONDAY + timedelta(days=9)
    )
    app.schedule("hourly", report.call(MONDAY), cron=["0 * * * *", "5 * * * *"], jitter="1m", most_runs=5)
    found = declared(app)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Declared) == found
    assert all(isinstance(each, Definition) for each in found.schedules)


class TestOwner:
    @staticmethod
    def printed(folder: Path, *arguments: str) -> str:
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            timeout=60,
            env={"PYTHONPATH": f"{folder}:{root / 'src'}", "PATH": ""},
        )
        return done.stdout.strip()

    def test_the_owner_of_an_unnamed_app_is_its_module_and_variable_however_it_runs(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "shop").mkdir()
        (tmp_path / "shop" / "__init__.py").write_text("")
        text = (
            "from everbeat import App\n"
            "from everbeat.app import definition_of\n"
            f"app = App({NOWHERE!r})\n"
            "@app.schedule('hourly', every='1h')\n"
            "@app.task\n"
            "def report() -> None: ...\n"
            "print(definition_of(app).schedules.owner)\n"
        )
        (tmp_path / "reports.py").write_text(text)
        (tmp_path / "shop" / "reports.py").write_text(text)
        assert self.printed(tmp_path, "-c", "import reports") == "reports:app"
        assert self.printed(tmp_path, "reports.py") == "reports:app"
        assert self.printed(tmp_path, str(tmp_path / "reports.py")) == "reports:app"
        assert self.printed(tmp_path, "-c", "import shop.reports") == "shop.reports:app"
        assert self.printed(tmp_path, "-m", "shop.reports") == "shop.reports:app"


class TestReference:
    ROWS = table("configuration.md", "Option", "Default", "Allowed", "Meaning")

    def test_every_option_is_documented_in_order(self) -> None:
        assert [row["Option"] for row in self.ROWS] == list(ScheduleOptions.__annotations__)

    def test_the_documented_default_of_an_option_is_that_of_the_code(self) -> None:
        app = app_of()

        @app.task
        def report() -> None: ...

        bare = Schedule("report", report.call(), cron="@hourly")
        given = {row["Option"]: row["Default"].strip('"') for row in self.ROWS if row["Default"] != "None"}
        given["most"] = int(given["most"])  # type: ignore[assignment]
        assert Schedule("report", report.call(), cron="@hourly", **given).rule == bare.rule  # type: ignore[typeddict-item]
