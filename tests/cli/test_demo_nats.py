"""`everbeat demo --nats`, really played: the same blows, tasks told by a NATS server that is killed, too."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from everbeat.cli.demo.evidence import Evidence, Messages
from everbeat.cli.demo.plan import ACTS
from everbeat.cli.demo.verdict import judge
from everbeat.cli.exit_codes import ExitCode
from everbeat.cli.nats_server import NatsServer, NoNatsServer
from tests.cli.conftest import Command
from tests.cli.outside import processes_of
from tests.nats_server import find_program

TOLD = Messages(published=9, delivered=12, delivered_after=4, left=0, away_s=3.0, ended_meanwhile=5)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of 30 files that are counted in no time."""
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(30):
        (folder / f"module_{number}.py").write_text(f"import os\n\n\n# {number}\ndef f(): ...\n")
    return folder


def nats_servers_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and "nats-server" in process.name():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.alone
@pytest.mark.story
def test_tasks_are_told_by_nats_and_the_work_goes_on_while_its_server_is_dead(
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
    assert [kill["noticed_by"] for kill in document["kills"]] == [act.noticed_by for act in ACTS]
    told = document["nats"]
    assert told["published"] > 0
    assert told["delivered"] > told["delivered_after"] > 0
    assert told["ended_meanwhile"] > 0
    assert told["away_s"] >= 3.0
    assert told["left"] == 0
    assert processes_of(everbeat.folder) == []
    assert nats_servers_in(temporary) == []


def refused(everbeat: Command, *command: str, code: Path, **environment: str) -> str:
    words = [*command, "demo", str(code), "--nats", "--headless"]
    done = subprocess.run(
        words, cwd=everbeat.folder, env=everbeat.environment | environment, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_without_the_server_the_demo_says_what_to_install(everbeat: Command, code: Path) -> None:
    # A Python beside which no nats-server lies, and a PATH without one.
    alone = everbeat.folder / "python"
    alone.symlink_to(sys.executable)
    paths = os.pathsep.join(path for path in sys.path if path)
    said = refused(everbeat, str(alone), "-m", "everbeat", code=code, PYTHONPATH=paths, PATH="/nowhere")
    assert "nats-server is missing" in said
    assert "pip install 'everbeat[nats,nats-server]'" in said


def test_without_the_client_the_demo_says_what_to_install(everbeat: Command, code: Path) -> None:
    program = "import sys; sys.modules['nats'] = None; from everbeat.cli.main import main; main(sys.argv[1:])"
    assert "pip install 'everbeat[nats]'" in refused(everbeat, sys.executable, "-c", program, code=code)


class TestServer:
    def test_it_keeps_its_address_and_its_store_over_a_kill(self, tmp_path: Path) -> None:
        find_program()
        server = NatsServer(tmp_path / "nats")
        try:
            server.start()
            url, pid = server.url, server.pid
            assert server.counters("NOBODY") is None
            server.kill()
            assert server.pid == 0
            with pytest.raises(OSError, match="refused"):
                server.counters("NOBODY")
            server.start()
            assert (server.url, server.counters("NOBODY")) == (url, None)
            assert server.pid != pid
        finally:
            server.close()
        assert not psutil.pid_exists(pid)

    def test_one_that_does_not_start_says_why(self, tmp_path: Path) -> None:
        find_program()
        server = NatsServer(tmp_path)
        (tmp_path / "server.conf").write_text("no such setting }")
        with pytest.raises(NoNatsServer, match="it says"):
            server.start()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"published": 0}, "told by NATS"),
        ({"delivered_after": 0}, "told by NATS"),
        ({"delivered": 4}, "told by NATS"),
        ({"ended_meanwhile": 0}, "goes on without it"),
        ({"left": 1}, "acknowledged"),
    ],
)
def test_each_promise_about_messages_can_be_broken(changes: dict[str, int], words: str) -> None:
    evidence = Evidence(
        folder=Path(),
        found=0,
        paths=(),
        files=(),
        strikes=(),
        recoveries=(),
        independent=None,
        took_s=0.0,
        messages=replace(TOLD, **changes),
    )
    about = [one for one in judge(evidence).promises if "NATS" in one.words or "message" in one.words]
    assert len(about) == 3
    assert [words in one.words for one in about if not one.held] == [True] * bool(words)
    assert judge(replace(evidence, messages=None)).promises == tuple(
        one for one in judge(evidence).promises if one not in about
    )
