"""`everbeat demo` with real trees and real kills: every promise holds, and nothing is left behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import psycopg
import pytest

from everbeat.cli.failures import ExitCode
from everbeat.demo.verification import FAULT_PLAN
from everbeat.embedded.server import EmbeddedServer
from tests.cli.conftest import Command
from tests.cli.outside import processes_of, until
from tests.nats_server import find_program

LONGEST_S = 90.0
STARTING_S = 60.0


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of 30 files that are counted at once, two of which are not Python."""
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(28):
        (folder / f"module_{number}.py").write_text(f"import os\n\n\n# {number}\ndef f(): ...\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "foreign.py").write_bytes(b"x = '\xff'\n")
    return folder


def schemas(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_demo_%'")
        return [row[0] for row in rows.fetchall()]


def assert_sound(document: dict[str, Any], *, files: int) -> None:
    """Check every promise again from the document alone."""
    assert [promise for promise in document["promises"] if not promise["held"]] == []
    assert document["ok"] is True
    assert (document["lost"], document["duplicated"], document["totals_match"]) == (0, 0, True)
    assert document["tasks"] == document["completed"] == files
    assert document["totals"] == document["independent_totals"]
    assert document["took_s"] <= LONGEST_S
    assert [(kill["what"], kill["noticed_by"]) for kill in document["kills"]] == [
        (planned.kind, planned.noticed_by) for planned in FAULT_PLAN
    ]
    for kill in document["kills"]:
        assert kill["recovered"] >= 1
        assert 0 <= kill["noticed_after_s"] <= kill["settled_after_s"]
    for recovery in document["recoveries"]:
        assert recovery["rerun_after_s"] >= recovery["noticed_after_s"] >= 0
        assert recovery["cause"]
    frozen = document["kills"][1]
    assert frozen["late_attempts_refused"] >= 1
    assert frozen["thawed_after_s"] > frozen["settled_after_s"]


@pytest.mark.story
class TestDemo:
    @pytest.mark.long
    @pytest.mark.alone
    def test_the_demo_counts_a_folder_and_keeps_every_promise(
        self, everbeat: Command, database_url: str, code: Path
    ) -> None:
        before = schemas(database_url)
        answer = everbeat("demo", str(code), "--url", database_url, "--headless", "--json", timeout_s=100)
        document = answer.document
        print({kill["what"]: kill["settled_after_s"] for kill in document["kills"]}, document["took_s"])
        assert_sound(document, files=30)
        answer.assert_code(0)
        assert document["totals"]["unparsable"] == document["totals"]["undecodable"] == 1
        assert document["totals"]["functions"] == 28
        kinds = {"count_on_the_loop", "count_in_a_thread", "count_in_a_process"}
        assert {recovery["task"] for recovery in document["recoveries"]} <= kinds
        assert answer.err == ""
        assert schemas(database_url) == before
        assert processes_of(everbeat.folder) == []

    @pytest.mark.alone
    def test_the_demo_counts_the_standard_library_on_its_own_embedded_server(self, everbeat: Command) -> None:
        began = time.monotonic()
        answer = everbeat("demo", "--headless", "--json", timeout_s=100, EVERBEAT_DATABASE_URL=None)
        took_s = time.monotonic() - began
        document = answer.document
        print({kill["what"]: kill["settled_after_s"] for kill in document["kills"]}, took_s)
        assert_sound(document, files=document["files"]["chosen"])
        answer.assert_code(0)
        assert took_s < LONGEST_S + 10
        assert document["totals"]["code_lines"] > 10_000
        assert not EmbeddedServer.status(everbeat.folder / ".everbeat").running
        assert processes_of(everbeat.folder) == []

    @pytest.mark.long
    def test_the_demo_without_a_terminal_prints_plain_lines_and_keeps_its_schema(
        self, everbeat: Command, database_url: str, code: Path
    ) -> None:
        before = set(schemas(database_url))
        answer = everbeat("demo", str(code), "--url", database_url, "--keep", timeout_s=100).assert_code(0)
        (kept,) = set(schemas(database_url)) - before
        for words in ("killed (SIGKILL)", "frozen (SIGSTOP)", "thawed (SIGCONT)", "every promise held"):
            assert words in answer.out
        with psycopg.connect(database_url, autocommit=True) as connection:
            states = connection.execute(f"select state, count(*) from {kept}.tasks group by state").fetchall()
            connection.execute(f"drop schema {kept} cascade")
        assert states == [("COMPLETED", 30)]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


class Screen:
    """Reads all that a program writes to a terminal: a full terminal would block the program."""

    def __init__(self, ours: int) -> None:
        self._ours = ours
        self._seen = b""
        Thread(target=self._read, daemon=True).start()

    def shows(self, words: bytes) -> bool:
        """Whether these words were written so far."""
        return words in self._seen

    def _read(self) -> None:
        with suppress(OSError):  # raised once no process has the other end open
            while read := os.read(self._ours, 1 << 20):
                self._seen += read


@pytest.mark.alone
@pytest.mark.story
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_demo_leaves_nothing_behind(
    everbeat: Command, database_url: str, code: Path, terminal: tuple[int, int], number: signal.Signals
) -> None:
    before = schemas(database_url)
    ours, theirs = terminal
    demo = subprocess.Popen(
        everbeat.argv("demo", str(code), "--url", database_url),
        cwd=everbeat.folder,
        env=everbeat.environment | {"COLUMNS": "140", "LINES": "40", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    screen = Screen(ours)
    try:
        until(lambda: screen.shows(b"SIGKILL") or demo.poll() is not None, within_s=STARTING_S)
        assert len(processes_of(everbeat.folder)) > 6
        demo.send_signal(number)
        assert demo.wait(STARTING_S) == 130
        assert "Interrupted" in demo.communicate()[1]
        assert screen.shows(b"alive")
        assert schemas(database_url) == before
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)
    finally:
        demo.kill()
        demo.wait()


class TestRefusals:
    def test_the_demo_refuses_a_folder_with_too_few_files(self, everbeat: Command, tmp_path: Path) -> None:
        (tmp_path / "few").mkdir()
        (tmp_path / "few" / "one.py").touch()
        answer = everbeat("demo", str(tmp_path / "few")).assert_code(2)
        assert "holds 1 Python file" in " ".join(answer.err.split())
        assert not (tmp_path / ".everbeat").exists()

    def test_the_demo_refuses_a_path_that_is_not_a_folder(self, everbeat: Command) -> None:
        assert "is not a folder" in everbeat("demo", "shop.py").assert_code(2).err
        assert "is not a folder" in everbeat("demo", "nowhere").assert_code(2).err

    def test_the_demo_reports_an_unreachable_database(self, everbeat: Command, code: Path) -> None:
        url = "postgresql://nobody@127.0.0.1:1/none"
        answer = everbeat("demo", str(code), "--url", url, "--headless", "--json").assert_code(3)
        assert answer.error["code"] == "DATABASE_UNREACHABLE"
        assert answer.out == ""


def nats_servers_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and "nats-server" in process.name():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.story
def test_the_demo_continues_while_its_nats_server_is_dead(
    everbeat: Command, database_url: str, code: Path, tmp_path: Path
) -> None:
    find_program()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ("demo", str(code), "--nats", "--url", database_url, "--headless", "--json")
    answer = everbeat(*words, timeout_s=100, TMPDIR=str(temporary))
    document = answer.document
    print(document["took_s"], document["nats"])
    assert [promise for promise in document["promises"] if not promise["held"]] == []
    answer.assert_code(0)
    assert (document["lost"], document["duplicated"], document["totals_match"]) == (0, 0, True)
    assert document["completed"] == document["tasks"] >= 20  # a slow machine is given fewer of the last files
    assert [kill["noticed_by"] for kill in document["kills"]] == [
        planned.noticed_by for planned in FAULT_PLAN
    ]
    counts = document["nats"]
    assert counts["published"] > 0
    assert counts["delivered"] > counts["delivered_after"] > 0
    assert counts["ended_meanwhile"] > 0
    assert counts["away_s"] >= 3.0
    assert counts["left"] == 0
    assert processes_of(everbeat.folder) == []
    assert nats_servers_in(temporary) == []


def refusal(everbeat: Command, *command: str, code: Path, **environment: str) -> str:
    words = [*command, "demo", str(code), "--nats", "--headless"]
    done = subprocess.run(
        words, cwd=everbeat.folder, env=everbeat.environment | environment, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_a_missing_nats_server_is_reported_with_what_to_install(everbeat: Command, code: Path) -> None:
    # A Python beside which no nats-server lies, and a PATH without one.
    alone = everbeat.folder / "python"
    alone.symlink_to(sys.executable)
    paths = os.pathsep.join(path for path in sys.path if path)
    said = refusal(everbeat, str(alone), "-m", "everbeat", code=code, PYTHONPATH=paths, PATH="/nowhere")
    assert "The program nats-server is neither" in said
    assert "pip install 'everbeat[nats,nats-server]'" in said


def test_a_missing_nats_client_is_reported_with_what_to_install(everbeat: Command, code: Path) -> None:
    program = "import sys; sys.modules['nats'] = None; from everbeat.cli.main import main; main(sys.argv[1:])"
    assert "pip install 'everbeat[nats]'" in refusal(everbeat, sys.executable, "-c", program, code=code)
