"""`everbeat worker --reload`: the next task runs the saved code, and the command alone decides when all processes end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from uuid import UUID

import psutil
import pytest

from everbeat import App
from tests.stories.scenario import Scenario, Tree

pytestmark = pytest.mark.story

CODE = """
import os
from everbeat import App

app = App(os.environ["STORY_URL"], schema=os.environ["STORY_SCHEMA"])

@app.task
def version() -> int:
    return {version}
"""

SAVES = count()


def save(scenario: Scenario, text: str) -> None:
    """Save as an editor does: a new file replaces the old one, within the same second, the resolution of Python's bytecode cache."""
    new = scenario.folder / "edited.tmp"
    new.write_text(text)
    number = next(SAVES)
    os.utime(new, ns=(number, 1_800_000_000_000_000_000 + number))
    new.replace(scenario.folder / "edited.py")


def saves(scenario: Scenario, version: int) -> None:
    save(scenario, CODE.format(version=version))


@pytest.fixture
def sender(scenario: Scenario) -> Iterator[App]:
    app = App(scenario.url, schema=scenario.schema)
    yield app
    app.close()


def answer(scenario: Scenario, app: App, tree: Tree) -> int:
    task_id = app.send_by_name("version").id
    scenario.until(scenario.state_is(task_id, "COMPLETED"), within=60, what="it ran", tree=tree)
    return int(scenario.task(task_id)["result"])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reloading(scenario: Scenario, *options: str) -> Tree:
    tree = scenario.start_tree(program="edited", options=("--reload", *options))
    alive = "select 1 from {schema}.workers where ended_at is null"
    scenario.until(lambda: scenario.query(alive), within=60, what="a worker", tree=tree)
    return tree


def test_the_next_task_runs_the_saved_code_and_an_error_in_it_waits_for_the_next_change(
    scenario: Scenario, sender: App, monkeypatch: pytest.MonkeyPatch
) -> None:  # J10
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    saves(scenario, 1)
    tree = reloading(scenario)
    assert answer(scenario, sender, tree) == 1
    saves(scenario, 2)
    scenario.until_logged(tree, "reload_changed files=edited.py", within=30)
    assert answer(scenario, sender, tree) == 2
    save(scenario, "def broken(:\n")
    scenario.until_logged(tree, "reload_waits exit_code=1", within=60)
    assert "edited.py" in tree.output().partition("error: ")[2], "the error is shown with its place"
    saves(scenario, 30)
    assert answer(scenario, sender, tree) == 30
    (scenario.folder / ".venv").mkdir()
    (scenario.folder / ".venv" / "lib.py").write_text("")
    assert tree.output().count("reload_watches") == 1, "that it is for development is said once"
    everyone = [each.pid for each in tree.processes()]
    tree.process.send_signal(signal.SIGINT)
    assert tree.process.wait(timeout=60) == 0
    assert all(map(is_gone, everyone))
    assert tree.output().count("reload_changed files=") == 3, "a hidden folder is not watched"


@pytest.mark.long
def test_a_reload_releases_running_tasks_and_the_new_code_runs_them(
    scenario: Scenario, sender: App
) -> None:  # J10
    slow = (
        CODE
        + "\n@app.task(on_crash='retry')\nasync def nap() -> str:\n    import asyncio\n    await asyncio.sleep({nap})\n    return 'done'\n"
    )
    save(scenario, slow.format(version=1, nap=600))
    tree = reloading(scenario, "--grace", "200ms", "--log-format", "json")
    task_id: UUID = sender.send_by_name("nap").id
    scenario.until(scenario.state_is(task_id, "RUNNING"), within=60, what="it runs", tree=tree)
    save(scenario, slow.format(version=2, nap=0))
    scenario.until(scenario.state_is(task_id, "COMPLETED"), within=60, what="the new code ran it", tree=tree)
    assert [each["outcome"] for each in scenario.attempts(task_id)] == ["RELEASED", "COMPLETED"]
    assert scenario.recoveries() == []
    scenario.until_logged(tree, '"reload_changed"')
    lines = [json.loads(line) for line in tree.output().splitlines()]
    changes = [each for each in lines if each.get("event") == "reload_changed"]
    assert [each["fields"] for each in changes] == [{"files": "edited.py"}]
    everyone = [each.pid for each in tree.processes()]
    assert tree.stop() == 0
    assert all(map(is_gone, everyone))


def test_the_tree_of_a_killed_reloader_ends(scenario: Scenario) -> None:  # J10
    saves(scenario, 1)
    tree = reloading(scenario, "--log-format", "json")
    everyone = [each.pid for each in tree.processes()]
    assert len(everyone) >= 3
    os.kill(tree.pid, signal.SIGKILL)
    scenario.until(lambda: all(map(is_gone, everyone)), within=30, what="no process is left")
    assert all(map(json.loads, tree.output().splitlines())), "the command that watches logs as its tree does"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reload-dir", "."], "--reload-dir needs --reload"),
        (["--reload", "--reload-dir", "nowhere"], "--reload-dir 'nowhere' is not a folder"),
        (["--reload", "--grace", "soon"], "--grace = 'soon'"),
    ],
)
def test_files_that_cannot_be_watched_are_rejected(
    scenario: Scenario, words: list[str], said: str
) -> None:  # J10
    ended = subprocess.run(
        [sys.executable, "-m", "everbeat", "worker", "edited:app", *words],
        cwd=scenario.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    assert said in ended.stderr
