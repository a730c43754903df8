"""`everbeat demo`, really played: real trees, real kills, and nothing left behind however it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from everbeat.cli.demo.plan import ACTS
from everbeat.store.embedded import EmbeddedServer
from tests.cli.conftest import Command
from tests.cli.outside import processes_of, until

LONGEST_S = 90.0
STARTING_S = 60.0


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of 30 files that are counted in no time, two of which are no Python."""
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
    """Every promise, looked at once more from the document alone."""
    assert [promise for promise in document["promises"] if not promise["held"]] == []
    assert document["ok"] is True
    assert (document["lost"], document["duplicated"], document["totals_match"]) == (0, 0, True)
    assert document["tasks"] == document["completed"] == files
    assert document["totals"] == document["independent_totals"]
    assert document["took_s"] <= LONGEST_S
    assert [(kill["what"], kill["noticed_by"]) for kill in document["kills"]] == [
        (act.blow, act.noticed_by) for act in ACTS
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
    def test_a_folder(self, everbeat: Command, database_url: str, code: Path) -> None:
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
    def test_the_standard_library_on_an_embedded_server_of_its_own(self, everbeat: Command) -> None:
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
    def test_plain_lines_where_there_is_no_terminal_and_a_schema_to_keep(
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
    """Everything that a program writes to a terminal, read at once: a full terminal would hold the program up."""

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
    def test_a_folder_with_too_few_files(self, everbeat: Command, tmp_path: Path) -> None:
        (tmp_path / "few").mkdir()
        (tmp_path / "few" / "one.py").touch()
        answer = everbeat("demo", str(tmp_path / "few")).assert_code(2)
        assert "holds 1 Python file" in " ".join(answer.err.split())
        assert not (tmp_path / ".everbeat").exists()

    def test_something_that_is_no_folder(self, everbeat: Command) -> None:
        assert "is no folder" in everbeat("demo", "shop.py").assert_code(2).err
        assert "is no folder" in everbeat("demo", "nowhere").assert_code(2).err

    def test_a_database_that_cannot_be_reached(self, everbeat: Command, code: Path) -> None:
        url = "postgresql://nobody@127.0.0.1:1/none"
        answer = everbeat("demo", str(code), "--url", url, "--headless", "--json").assert_code(3)
        assert answer.error["code"] == "DATABASE_UNREACHABLE"
        assert answer.out == ""
