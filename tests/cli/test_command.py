"""Test the command as a whole: help, speed, completion, exit codes and error messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from everbeat.cli.failures import MEANINGS, ExitCode
from everbeat.cli.main import COMMANDS
from tests.cli.conftest import Command
from tests.cli.outside import until
from tests.variants import every_nth_quick

WRITTEN_ELSEWHERE = {"demo"}


def test_help_lists_every_command_and_every_exit_code(everbeat: Command) -> None:
    answer = everbeat("--help").assert_code(0)
    shown = " ".join(answer.out.split())  # a long summary is on several lines
    for name, (_, summary) in COMMANDS.items():
        assert name in answer.out
        assert summary in shown
    for code, meaning in MEANINGS.items():
        assert f"{code.value:<4} {meaning}" in answer.out
    assert set(MEANINGS) == set(ExitCode)


@pytest.mark.parametrize("name", every_nth_quick(4, sorted(COMMANDS.keys() - WRITTEN_ELSEWHERE)))
def test_every_command_has_a_help_page(everbeat: Command, name: str) -> None:
    answer = everbeat(name, "--help").assert_code(0)
    assert f"everbeat {name}" in answer.out


@pytest.mark.alone
def test_help_takes_little_longer_than_its_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(*arguments: str) -> float:
        started = perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
        return (perf_counter() - started) * 1_000

    once("-m", "everbeat", "--help")  # writes the bytecode
    pairs = [(once("-m", "everbeat", "--help"), once("-c", "import everbeat, typer")) for _ in range(7)]
    help_ms, imports_ms = (median(each) for each in zip(*pairs, strict=True))
    with capsys.disabled():
        print(f" everbeat --help: {help_ms:.0f} ms, of which imports {imports_ms:.0f} ms", end="")
    assert help_ms < 2 * imports_ms


def test_help_does_not_import_the_commands(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom everbeat.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*sorted({'rich', 'rich.console', 'everbeat.cli.tasks', 'everbeat.cli.output'} & sys.modules.keys()), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stderr.split() == []


def test_everbeat_without_a_command_shows_its_help(everbeat: Command) -> None:
    answer = everbeat().assert_code(ExitCode.USAGE)
    assert "Commands:" in answer.out + answer.err


def test_the_version_option_prints_the_version(everbeat: Command) -> None:
    assert everbeat("--version").assert_code(0).out.strip().count(".") == 2


def test_an_unknown_command_is_refused_with_the_nearest_name(everbeat: Command) -> None:
    answer = everbeat("taks").assert_code(ExitCode.USAGE)
    assert "'tasks'" in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("command", [["queues"], ["tasks", "list"], ["send", "name"], ["check", "shop"]])
def test_unknown_command_options_are_refused(everbeat: Command, command: list[str]) -> None:
    answer = everbeat(*command, "--bogus").assert_code(ExitCode.USAGE)
    assert "--bogus" in answer.err


@pytest.mark.parametrize(
    "command", every_nth_quick(5, [["queues"], ["workers"], ["tasks", "list"], ["recoveries"], ["sweep"]])
)
def test_every_command_reports_an_unreachable_database_without_a_traceback(
    everbeat: Command, command: list[str]
) -> None:
    nowhere = "postgresql://user:secret@127.0.0.1:1/nowhere"
    answer = everbeat(*command, EVERBEAT_DATABASE_URL=nowhere).assert_code(ExitCode.DATABASE)
    assert answer.err.startswith("error: The database at")
    assert "fix: " in answer.err
    assert "secret" not in answer.err
    assert "Traceback" not in answer.err


def test_an_error_of_a_command_is_one_json_document_on_stderr(everbeat: Command) -> None:
    answer = everbeat("queues", "--json").assert_code(ExitCode.DATABASE)
    assert answer.out == ""
    assert answer.error["code"] == "SCHEMA_MISSING"
    assert "everbeat migrate" in answer.error["fix"]


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        (["bench", "--tasks", "0"], "'--tasks': '0' must be greater than or equal to 1", "bench --help"),
        (["recoveries", "show", "x"], "'NO': 'x' must be a valid integer", "recoveries show --help"),
        (["tasks", "list", "--state", "bad"], "'bad'", "give one of these: pending, claimed"),
        (["queues", "--bogus"], "--bogus", "everbeat queues list --help"),
        (["taks"], "'taks'", "everbeat --help"),
        (["send"], "NAME", "everbeat send --help"),
    ],
)
def test_a_usage_error_is_one_json_document_on_stderr(
    everbeat: Command, words: list[str], told: str, fix: str
) -> None:
    answer = everbeat(*words, "--json").assert_code(ExitCode.USAGE)
    assert answer.out == ""
    assert answer.error["code"] == "WRONG_USAGE"
    assert told in answer.error["message"]
    assert fix in answer.error["fix"]


def test_a_json_error_has_the_fix_and_the_value_in_separate_fields(everbeat: Command) -> None:
    error = everbeat("bench", "--only", "drian", "--json").assert_code(ExitCode.USAGE).error
    assert error["fix"] == "use 'drain'."
    assert "Fix" not in error["message"]
    assert error["problems"][0]["value"] == "drian"


def test_a_json_error_separates_several_problems_from_their_fixes(everbeat: Command) -> None:
    wrong = ("--terminal-records", "-1", "--heartbeats", "-2")
    error = everbeat("prune", "--dry-run", "--json", *wrong).assert_code(ExitCode.USAGE).error
    assert len(error["problems"]) == 2
    assert "Fix" not in error["message"]
    assert error["fix"].splitlines() == [f"{problem['fix']}." for problem in error["problems"]]


def test_an_interrupted_command_exits_with_130_and_a_json_error(everbeat: Command) -> None:
    everbeat("migrate").assert_code(0)
    url = everbeat.environment["EVERBEAT_DATABASE_URL"]
    sent = subprocess.Popen(
        everbeat.argv("send", "--json", "--wait", "--url", url, "nothing"),
        cwd=everbeat.folder,
        env=everbeat.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        # The task is stored, so the command waits for it now.
        until(lambda: everbeat("tasks", "list", "--json").document["tasks"], within_s=30)
        sent.send_signal(signal.SIGINT)
        assert sent.wait(timeout=10) == ExitCode.INTERRUPTED
    finally:
        sent.kill()
        sent.communicate()


def test_a_missing_database_url_is_refused_with_every_way_to_set_it(everbeat: Command) -> None:
    answer = everbeat("queues", EVERBEAT_DATABASE_URL=None).assert_code(ExitCode.DATABASE)
    for way in ("--url", "EVERBEAT_DATABASE_URL", "--app", "embedded"):
        assert way in answer.err
    assert "App(" not in answer.err


@pytest.mark.parametrize("words", [["queues", "--schema", "a b"], ["migrate", "--sql", "--schema", "a b"]])
def test_an_invalid_schema_option_is_a_usage_error(everbeat: Command, words: list[str]) -> None:
    assert "--schema = 'a b': a schema name" in everbeat(*words).assert_code(ExitCode.USAGE).err
    answer = everbeat(*[word for word in words if word not in ("--schema", "a b")], EVERBEAT_SCHEMA="a b")
    assert "EVERBEAT_SCHEMA = 'a b': a schema name" in answer.assert_code(ExitCode.USAGE).err


@pytest.mark.parametrize(
    "words",
    [["tasks", "show"], ["tasks", "cancel"], ["tasks", "retry"], ["explain"], ["recoveries", "--task"]],
)
def test_an_invalid_id_is_refused_with_the_command_that_lists_ids(
    everbeat: Command, words: list[str]
) -> None:
    answer = everbeat(*words, "123").assert_code(ExitCode.USAGE)
    assert "everbeat tasks list" in answer.err
    assert "handle.id" not in answer.err


def test_a_worker_without_slots_is_refused_with_the_names_of_the_options(everbeat: Command) -> None:
    none = ("--threads", "0", "--concurrency", "0", "--task-processes", "0")
    answer = everbeat("worker", "shop:app", *none).assert_code(ExitCode.USAGE)
    assert "give --concurrency, --threads or --task-processes 1 or more" in answer.err
    assert "_concurrency" not in answer.err


def test_a_mistyped_queue_option_is_refused_with_the_nearest_name(everbeat: Command) -> None:  # J9
    everbeat.write(
        "post.py",
        "from everbeat import App, QueueConfig\n\n"
        'app = App(queues=[QueueConfig("mail")])\n\n\n'
        '@app.task(queue="mail")\ndef letter() -> None: ...\n',
    )
    answer = everbeat("worker", "post:app", "--queues", "mial").assert_code(ExitCode.USAGE)
    assert "--queues" in answer.err
    assert "fix: use 'mail'" in answer.err


def test_the_app_option_excludes_the_schema_option(everbeat: Command) -> None:
    answer = everbeat("queues", "--app", "shop:app", "--schema", "other").assert_code(ExitCode.USAGE)
    assert "--app" in answer.err


def test_everbeat_debug_shows_the_traceback(everbeat: Command) -> None:
    answer = everbeat("queues", EVERBEAT_DEBUG="1")
    assert "Traceback" in answer.err
    assert answer.code == 1


def test_a_pipe_gets_whole_lines_without_colours(everbeat: Command) -> None:
    everbeat("migrate").assert_code(0)
    everbeat("send", "--url", everbeat.environment["EVERBEAT_DATABASE_URL"], "n" * 150).assert_code(0)
    answer = everbeat("tasks", "list").assert_code(0)
    assert "n" * 150 in answer.out
    assert "\x1b" not in answer.out


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
@pytest.mark.parametrize(
    ("typed", "expected"),
    every_nth_quick(
        3, [("everbeat tasks ", "cancel"), ("everbeat ta", "tasks"), ("everbeat migrate --st", "--status")]
    ),
)
def test_shell_completion_lists_commands_and_options(everbeat: Command, typed: str, expected: str) -> None:
    words = len(typed.split(" ")) - 1
    answer = everbeat(
        _EVERBEAT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(words)
    ).assert_code(0)
    assert expected in answer.out.split()


@pytest.mark.parametrize("shell", every_nth_quick(3, ["bash", "zsh", "fish"]))
def test_shell_completion_can_be_shown_for_each_shell(everbeat: Command, shell: str) -> None:
    answer = everbeat("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_EVERBEAT_COMPLETE" in answer.assert_code(0).out
