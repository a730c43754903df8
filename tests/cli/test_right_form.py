"""Test that a command line with a mistake is refused with the correct form, and that messages about workers are true."""

from __future__ import annotations

from pathlib import Path

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.errors import ConfigurationError
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.client.test_explaining import end_workers
from tests.client.test_explaining_needs import OLD, marked, registers, replace_workers
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick

__all__ = ["app", "db"]


@pytest.mark.parametrize(
    ("words", "fix"),
    every_nth_quick(
        2,
        [
            (["doctor", "--app", "shop:app"], "the app is an argument here: everbeat doctor shop:app"),
            (["doctor", "--app=shop:app"], "the app is an argument here: everbeat doctor shop:app"),
            (["worker", "--app", "shop:app", "--grace", "5s"], "everbeat worker shop:app --grace 5s"),
            (["check", "--app", "shop:app", "--live"], "everbeat check shop:app --live"),
            (["worker", "shop:app", "--url", "postgresql://u:secret@h/d"], "the app has its own database"),
            (["worker", "shop:app", "--schema", "s"], "the app has its own schema"),
            (["migrate", "shop:app"], "the app is an option here: everbeat migrate --app shop:app"),
            (["tasks", "list", "shop.py:app"], "everbeat tasks list --app shop.py:app"),
            (["queues", "shop:app"], "everbeat queues --app shop:app"),
            (["workers", "resume", "w1"], "everbeat workers quiet --resume ID"),
            (["tasks", "list", "--state", "runing"], "did you mean 'running'?"),
            (["tasks", "list", "--state", "waiting"], "give one of these: pending, claimed, running,"),
            (["workflows", "list", "--state", "waiting"], "give one of these: running, paused,"),
        ],
    ),
)
def test_an_option_of_another_command_is_refused_with_the_correct_form(
    everbeat: Command, words: list[str], fix: str
) -> None:  # J10
    said = everbeat(*words).assert_code(ExitCode.USAGE).err
    assert f"fix: {fix}" in said or (fix in said and "fix: " in said)
    assert "secret" not in said
    assert "Value error" not in said, "this is text of the parser library"
    assert "release" not in said, "the nearest command of the group has another purpose"
    assert fix in everbeat(*words, "--json").assert_code(ExitCode.USAGE).error["fix"].replace(" --json", "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["shop:app", "hello", "1"], "'1' is not an argument of 'hello': write it as parameter=value."),
        (
            ["--app", "shop:app", "hello", "1"],
            "'1' is not an argument of 'hello': write it as parameter=value.",
        ),
        (["--app", "shop:app", "shop:app", "hello"], "the app is given twice: as the LOCATOR 'shop:app'"),
        (["shop:app"], "write 'everbeat send shop:app NAME'"),
    ],
)
def test_a_refused_send_names_its_cause_and_proposes_no_form_that_is_refused_too(
    everbeat: Command, words: list[str], problem: str
) -> None:  # J10
    said = everbeat("send", *words).assert_code(ExitCode.USAGE).err
    assert problem in said
    assert "the app is an option here" not in said, "send takes the app before the name"


def test_a_refused_argument_does_not_propose_an_app_that_is_given(everbeat: Command) -> None:  # J10
    said = everbeat("tasks", "list", "--app", "shop:app", "other:app").assert_code(ExitCode.USAGE).err
    assert "other:app" in said
    assert "fix:" not in said


@pytest.mark.parametrize(
    "words", [("tasks", "show"), ("tasks", "cancel"), ("workflows", "show"), ("explain",)]
)
def test_the_rule_for_an_id_on_the_command_line_allows_its_first_digits(
    everbeat: Command, app: App, words: tuple[str, ...]
) -> None:  # J10
    answer = everbeat(*words, "01a")
    assert "must be an id, or at least its first 4 digits" in answer.err
    assert "UUID" not in answer.err
    with pytest.raises(ConfigurationError, match="must be a UUID, or its string form"):
        app.explain("01a")


def test_check_live_does_not_create_an_embedded_server(everbeat: Command) -> None:  # J10
    for name, setting in (("makes", "'create'"), ("never", "False")):
        everbeat.write(
            f"{name}.py",
            f"""
            from everbeat import App

            app = App("embedded:data", auto_migrate={setting})

            @app.task
            def work() -> None: ...
            """,
        )
    answer = everbeat("check", "makes:app", "--live").assert_code(0)
    assert "There is no embedded PostgreSQL in" in answer.out
    assert "everbeat migrate" in answer.out
    assert "1 warning" in answer.err
    answer = everbeat("check", "never:app", "--live").assert_code(ExitCode.FAILED)
    assert "There is no embedded PostgreSQL in" in answer.out
    assert not Path(everbeat.folder, "data").exists()


def test_a_command_for_an_ended_worker_says_when_and_how_it_ended(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J10
    app.release_workers(["w1"])
    ended = everbeat("workers", "quiet", "w1", "--json").assert_code(ExitCode.NOT_FOUND).error
    assert ended["code"] == "WORKER_ENDED"
    assert ended["message"].startswith("Worker 'w1' ended at 2")
    assert "it was released by an operator" in ended["message"]
    assert ended["fix"].startswith("choose a live one: ")
    assert "w2" in ended["fix"]
    end_workers(db, "w2")
    db.connection.execute(
        db.plain("update {schema}.supervisors set ended_at = statement_timestamp(), ended_how = 'left'")
    )
    for words in (["w2"], ["s1"], ["--host", "host"]):
        gone = everbeat("workers", "quiet", *words, "--json").assert_code(ExitCode.NOT_FOUND).error
        assert gone["code"] == "WORKER_ENDED", gone
        assert "everbeat worker MODULE:APP" in gone["fix"]
    unknown = everbeat("workers", "--history", "w22", "--json").assert_code(ExitCode.NOT_FOUND).error
    assert "known: none; ended: " in unknown["message"]
    assert "did you mean" in unknown["fix"]


def test_workers_quiet_reports_exactly_the_workers_that_it_changed(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J10
    both = everbeat("workers", "quiet", "w1", "--all").assert_code(ExitCode.USAGE).err
    assert "ids and --all exclude each other" in both
    neither = everbeat("workers", "quiet", "--resume").assert_code(ExitCode.USAGE).err
    assert "the supervisors to resume" in neither
    never = everbeat("workers", "quiet", "--resume", "--all").assert_code(0).err
    assert "was not quiet." in never
    everbeat("workers", "quiet", "--all").assert_code(0)
    assert "claims again." in everbeat("workers", "quiet", "--resume", "--all").assert_code(0).err
    end_workers(db, "w1", "w2")
    db.connection.execute(db.plain("update {schema}.supervisors set ended_at = statement_timestamp()"))
    none = everbeat("workers", "quiet", "--all").assert_code(0).err
    assert none == "No supervisor runs. Start one: everbeat worker MODULE:APP.\n"


def test_explain_suggests_the_nearest_argument_that_a_worker_takes(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J10
    replace_workers(app, db, v1=registers(OLD))
    page = " ".join(everbeat("explain", str(marked(db, "userid"))).assert_code(0).out.split())
    assert "does not take 'userid' ('userid': did you mean 'user_id'?)" in page
    assert "everbeat worker" not in page, "a worker with the same code does not help"
