"""With --log-format json, every line that a process of a tree writes to stderr is one JSON object, even if the tree dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.scenario import FAST, Scenario, Tree, program_of
from tests.variants import long_except

pytestmark = pytest.mark.story

ALWAYS = {"time", "level", "logger", "message", "pid"}
TASK_FIELDS = {"task_id", "task_name", "attempt", "worker_id"}
DASHBOARD = "https://ops.example.com/everbeat"
JSON = ("--log-format", "json", "--log-level", "debug")


@pytest.fixture
def talkative(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "talkative") as program:
        yield program


def lines(tree: Tree) -> list[dict[str, Any]]:
    """Return every complete line of the log so far."""
    found = [json.loads(line) for line in tree.log.read_bytes().split(b"\n")[:-1]]
    assert all(isinstance(each, dict) for each in found)
    return found


def matching(tree: Tree, **wanted: Any) -> list[dict[str, Any]]:
    return [each for each in lines(tree) if wanted.items() <= each.items()]


def pumps(tree: Tree) -> list[int]:
    """Return the processes that write the log of the tree."""
    found = []
    for each in psutil.Process(tree.pid).children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [each.pid] if "log_pump" in " ".join(each.cmdline()) else []
    return found


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_log_line_is_json_through_failures_deaths_stalls_and_a_stop(
    scenario: Scenario, talkative: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # J10
    monkeypatch.setenv("EVERBEAT_DASHBOARD_URL", DASHBOARD)
    tree = scenario.ready_tree(program="talkative", recovery=FAST, options=JSON)
    (worker,) = scenario.workers(tree)
    for task in (talkative.talk, talkative.stall, talkative.die):
        sent = task.send()
        scenario.until(scenario.state_is(sent.id, "FAILED"), within=30, what=f"{task.name} failed", tree=tree)
    done = talkative.wait.send()
    scenario.until(
        scenario.state_is(done.id, "COMPLETED"), within=30, what="a new worker process works", tree=tree
    )
    helpers = pumps(tree)
    assert tree.stop() == 0
    found = lines(tree)
    assert tree.log.read_bytes().endswith(b"\n")
    assert [each for each in found if not each.keys() >= ALWAYS] == [{"of": "the shop"}], (
        "JSON of the user passes as it is"
    )
    (failure,) = [each for each in matching(tree, event="task_failure") if each["fields"]["name"] == "talk"]
    assert failure["level"] == "ERROR"
    assert failure["fields"]["message"] == "two\nlines"
    assert failure["exception"].startswith("Traceback")
    assert failure["exception"].endswith("ValueError: two\nlines")
    (said,) = matching(tree, logger="shop")
    assert said["message"] == "several\nlines \x1b[31m \u202e \x7f"
    assert (said["fields"].keys() - {"order"}, said["fields"]["order"]) == (TASK_FIELDS | {"task_url"}, 5)
    assert (said["fields"]["task_name"], said["fields"]["attempt"]) == ("talk", 1)
    assert "\x7f" not in tree.output()
    assert "this is\nold" in matching(tree, logger="py.warnings")[0]["message"]
    (broken,) = matching(tree, event="uncaught_exception")
    assert broken["fields"] == {"thread": "broken"}
    assert "ValueError: invalid literal" in broken["exception"]
    texts = matching(tree, logger="stderr", pid=worker["pid"])
    assert [each["message"] for each in texts] == [
        "the module\nis imported",
        '{"not": json}\nand text',
        "from C",
    ]
    (stacks,) = [
        each for each in matching(tree, logger="stderr") if "most recent call first" in each["message"]
    ]
    assert "in stall" in stacks["message"], "the dump of a killed task process is one object"
    assert stacks["pid"] not in (tree.pid, worker["pid"])
    (death,) = [each for each in matching(tree, event="worker_exited") if not each["fields"]["in_order"]]
    assert (death["fields"]["pid"], death["pid"]) == (worker["pid"], tree.pid)
    recovered = [each for each in matching(tree, event="task_recovered") if each["pid"] == tree.pid]
    assert recovered, "the supervisor has recovered the task whose worker process died"
    for each in [said, failure, *recovered]:
        assert each["fields"]["task_url"] == f"{DASHBOARD}/tasks/{each['fields']['task_id']}"
    assert matching(tree, event="stop_asked")[0]["fields"] == {"times": 1}
    assert matching(tree, event="worker_drained")
    assert len(helpers) == 1
    scenario.until(lambda: all(map(is_gone, helpers)), within=30, what="the pump ends with the tree")


def test_each_line_of_user_code_names_its_task_on_the_loop_in_a_thread_and_in_a_task_process(
    scenario: Scenario, talkative: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # O8
    monkeypatch.setenv("EVERBEAT_DASHBOARD_URL", DASHBOARD)
    tree = scenario.ready_tree(program="talkative", options=JSON)
    (worker,) = scenario.workers(tree)
    sent = {
        word: task.send(word)
        for task in (talkative.say_async, talkative.say_in_thread, talkative.say_apart)
        for word in (f"{task.name} first", f"{task.name} second")
    }
    for each in sent.values():
        scenario.until(scenario.state_is(each.id, "COMPLETED"), within=30, what="it has spoken", tree=tree)
    assert tree.stop() == 0
    found = lines(tree)
    assert tree.log.read_bytes().endswith(b"\n")
    assert all(each.keys() >= ALWAYS for each in found)
    said = {each["message"].partition("\n")[0]: each for each in found if each["logger"] == "shop.said"}
    assert said.keys() == sent.keys()
    for word, handle in sent.items():
        assert said[word]["message"] == f"{word}\nin two lines"
        assert said[word]["fields"] == {
            "task_id": str(handle.id),
            "task_name": word.split()[0],
            "attempt": 1,
            "worker_id": worker["id"],
            "task_url": f"{DASHBOARD}/tasks/{handle.id}",
        }
        is_apart = word.startswith("say_apart")
        assert (said[word]["pid"] == worker["pid"]) is not is_apart
    pids = {each["pid"] for each in found}
    assert {tree.pid, worker["pid"]} < pids, (
        "the supervisor, the worker process and task processes have written"
    )


def test_the_last_log_lines_of_a_killed_tree_arrive_and_its_log_pump_ends(
    scenario: Scenario, talkative: ModuleType
) -> None:  # J10
    tree = scenario.ready_tree(program="talkative", options=JSON)
    everyone = [each.pid for each in tree.processes()]
    sent = talkative.talk.send()
    scenario.until(scenario.state_is(sent.id, "FAILED"), within=30, what="it has talked", tree=tree)
    os.kill(tree.pid, signal.SIGKILL)
    tree.process.wait(timeout=30)
    scenario.until(lambda: all(map(is_gone, everyone)), within=30, what="no process is left")
    assert matching(tree, logger="shop")
    assert "from C" in [each["message"] for each in matching(tree, logger="stderr")]


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "killed by SIGKILL"), pytest.param(signal.SIGSTOP, "stopped", marks=pytest.mark.long)],
)
def test_a_log_pump_that_dies_or_is_stopped_is_replaced_without_losing_a_task(
    scenario: Scenario, talkative: ModuleType, number: signal.Signals, cause: str
) -> None:  # J10
    tree = scenario.ready_tree(program="talkative", options=JSON)
    enough = scenario.folder / "enough"
    tasks = [each.send(str(enough)) for each in (talkative.chatter, talkative.chatter_apart)]

    def are_heard() -> bool:
        heard = "".join(
            each["message"][:1] + each["message"][-1:] for each in matching(tree, logger="stderr")
        )
        return "x" in heard and "y" in heard

    scenario.until(are_heard, within=30, what="both tasks write", tree=tree)
    (first,) = pumps(tree)
    os.kill(first, number)

    def is_replaced() -> bool:
        return is_gone(first) and bool(matching(tree, event="log_pump_replaced"))

    scenario.until(is_replaced, within=30, what="a new pump runs", tree=tree)
    written = tree.log.stat().st_size
    scenario.until(
        lambda: tree.log.stat().st_size > written + 1_000_000, within=30, what="more is written than a socket holds", tree=tree
    )  # fmt: skip
    enough.touch()
    for sent in tasks:
        scenario.until(
            scenario.state_is(sent.id, "COMPLETED", "FAILED"), within=30, what="it ended", tree=tree
        )
        assert scenario.task(sent.id)["state"] == "COMPLETED"
        assert len(scenario.attempts(sent.id)) == 1
    (second,) = pumps(tree)
    assert tree.stop() == 0
    (replaced,) = matching(tree, event="log_pump_replaced")
    assert (replaced["pid"], replaced["fields"]) == (second, {"cause": cause})
    assert replaced.keys() >= ALWAYS
    assert matching(tree, event="worker_drained"), "the log goes on as JSON"


def test_a_process_can_write_after_the_reader_of_the_log_has_ended() -> None:  # J10
    program = """
import os
from everbeat.cli.json_stderr import stderr_as_json
with stderr_as_json():
    for _ in range(1_000):
        os.write(2, b"x" * 5_000 + b"\\n")
print("all is written")
"""
    readable, writable = os.pipe()
    os.close(readable)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writable, text=True, timeout=60
        )
    finally:
        os.close(writable)
    assert (ended.returncode, ended.stdout) == (0, "all is written\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    long_except(
        [
            (["sample_tasks:app", "--concurrency", "-1"], "WRONG_USAGE", "'--concurrency'"),
            (["sample_tasks:app", "--bogus"], "WRONG_USAGE", "--bogus"),
            (["sample_tasks:app", "--grace", "soon"], "CONFIGURATION_INVALID", "--grace = 'soon'"),
            (["nowhere:app"], "WORKER_REFUSED", "There is no module 'nowhere'"),
            (["broken_import:app"], "WORKER_REFUSED", "broken_import"),
        ],
        (["sample_tasks:app", "--grace", "soon"], "CONFIGURATION_INVALID", "--grace = 'soon'"),
        (["broken_import:app"], "WORKER_REFUSED", "broken_import"),
    ),
)
def test_a_worker_that_cannot_start_reports_the_error_in_one_json_line(
    scenario: Scenario, words: list[str], code: str, message: str
) -> None:  # J10
    (scenario.folder / "broken_import.py").write_text("import sys\nsys.stderr.write('before\\n')\n1 / 0\n")
    ended = subprocess.run(
        [sys.executable, "-m", "everbeat", "worker", *words, "--log-format", "json"],
        cwd=scenario.folder, env=scenario.environment(recovery={}, worker={}), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    *before, last = map(json.loads, ended.stderr.splitlines())
    assert all(each.keys() >= ALWAYS for each in (*before, last))
    assert (last["level"], last["event"], last["fields"]["code"]) == ("ERROR", "command_failed", code)
    assert message in last["message"]
    assert last["fields"]["fix"]
    assert ended.stdout == ""


def test_an_unknown_log_format_is_rejected(scenario: Scenario) -> None:  # J10
    ended = subprocess.run(
        [sys.executable, "-m", "everbeat", "worker", "sample_tasks:app", "--log-format", "yaml"], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert ended.returncode == 2
    assert "'yaml' is not a --log-format: use text or json" in ended.stderr
