"""Test `everbeat workflows`: lists, pages, drawings and commands, with a test that acts as the workers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest

from everbeat import App, TaskError, TaskFailed
from everbeat.cli.failures import ExitCode
from everbeat.domain.workflow.graph import Edge
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.client.test_explaining import change
from tests.store.conftest import StoreHarness
from tests.store.flows import after, task
from tests.workflows.sent import child, mapped, sent

__all__ = ["app", "db"]

ORDER = [
    task("reserve"),
    task("charge"),
    *mapped("measure", 2, 1_200),
    child("ship", task("fold")),
    task("report"),
]
EDGES = [Edge(0, 1), *after(1203, 1), *after(1204, 2, 1203)]


def ids(everbeat: Command, *options: str) -> list[str]:
    found = everbeat("workflows", *options, "--json").assert_code(0).document
    return [each["id"] for each in found["workflows"]]


def test_the_workflows_command_filters_workflows(everbeat: Command, app: App, db: StoreHarness) -> None:
    first, flow = sent(app, db, [child("ship", task("fold"))], key="k1")
    flow.play()
    second, _ = sent(app, db, [task("a")], name="refund")
    inner = first.nodes()[0].task_id
    assert ids(everbeat) == ids(everbeat, "list") == [str(second.id), str(first.id)]
    assert set(ids(everbeat, "--children")) == {str(first.id), str(second.id), str(inner)}
    assert ids(everbeat, "--name", "refund") == [str(second.id)]
    assert ids(everbeat, "--state", "completed") == ids(everbeat, "--key", "k1") == [str(first.id)]
    assert ids(everbeat, "list", "--limit", "1") == [str(second.id)]
    table = everbeat("workflows").assert_code(0).out.splitlines()
    assert table[0].split() == ["ID", "STATE", "NAME", "KEY", "NODES", "SENT", "WHAT"]
    assert table[1].split()[:4] == [str(second.id), "RUNNING", "refund", "1"]
    assert table[1].endswith("1 ENQUEUED")
    assert table[2].split()[:5] == [str(first.id), "COMPLETED", "order", "k1", "1"]
    more = everbeat("workflows", "--limit", "1").assert_code(0)
    assert "There might be more" in more.err
    (newest,) = everbeat("workflows", "--limit", "1", "--json").assert_code(0).document["workflows"]
    assert more.err == f"There might be more: --before {newest['id']}\n"
    rest = everbeat("workflows", "--before", newest["id"], "--json").assert_code(0).document["workflows"]
    assert newest["id"] not in [each["id"] for each in rest]
    assert len(rest) == len(everbeat("workflows", "--json").document["workflows"]) - 1
    empty = everbeat("workflows", "--name", "other").assert_code(0)
    assert (empty.out, empty.err) == ("", "No matching workflows.\n")
    assert "--state" in everbeat("workflows", "--state", "done").assert_code(ExitCode.USAGE).err
    assert "--limit" in everbeat("workflows", "--limit", "99999").assert_code(ExitCode.USAGE).err


def test_workflows_show_lists_all_nodes_and_folds_maps(everbeat: Command, app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, ORDER, EDGES, output=1204, key="k1")
    flow.end(flow.claim(600), lambda name: name)
    flow.settle_down()
    page = everbeat("workflows", "show", str(handle.id)).assert_code(0).out
    assert len(page.splitlines()) < 30
    for said in (
        str(handle.id),
        "order",
        "k1",
        "RUNNING",
        "1,205: ",
        "report",
        "so far",
        "waits for measure (ENQUEUED ",
    ):
        assert said in page
    (line,) = (line for line in page.splitlines() if line.startswith("measure"))
    assert line.split()[:4] == ["measure[0..1199]", "ENQUEUED", "map", "work"]
    counts = {word: int(count) for count, word in _pairs(line)}
    assert set(counts) == {"COMPLETED", "ENQUEUED"}
    assert sum(counts.values()) == 1_200

    flow.play(lambda name: RuntimeError("torn") if name == "fold" else [name])
    page = everbeat("workflows", "show", str(handle.id)).assert_code(0).out
    inner = next(node.task_id for node in handle.nodes() if node.name == "ship")
    ship = next(line for line in page.splitlines() if line.startswith("ship"))
    assert "SUBWORKFLOW_FAILED" in ship
    assert ship.endswith(str(inner))
    assert "SKIPPED" in next(line for line in page.splitlines() if line.startswith("report"))
    assert "error     " in page
    assert "parent    " in everbeat("workflows", "show", str(inner)).assert_code(0).out

    document = everbeat("workflows", "show", str(handle.id), "--json").assert_code(0).document
    assert (document["state"], document["node_count"], len(document["nodes"])) == ("FAILED", 1_205, 1_205)
    assert document["counts"] == {"COMPLETED": 1_203, "FAILED": 1, "SKIPPED": 1}
    assert document["nodes"][1]["needs"] == ["reserve"]


def _pairs(line: str) -> list[tuple[str, str]]:
    words = line.replace(",", "").split()
    return [(one, other) for one, other in pairwise(words) if one.isdigit() and other.isupper()]


def test_the_exception_class_is_shown_for_failed_tasks_nodes_and_workflows(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J4
    handle, flow = sent(app, db, [task("a"), child("ship", task("fold"))])
    flow.play(lambda name: TaskError("UNHANDLED_EXCEPTION", "k", type="KeyError"))
    node = next(node.task_id for node in handle.nodes() if node.name == "a")
    for words in (
        ("tasks", "list"),
        ("tasks", "show", str(node)),
        ("explain", str(node)),
        ("workflows",),
        ("workflows", "show", str(handle.id)),
        ("explain", str(handle.id)),
    ):
        assert "UNHANDLED_EXCEPTION (KeyError)" in " ".join(everbeat(*words).assert_code(0).out.split()), (
            words
        )
    with pytest.raises(TaskFailed, match=r"UNHANDLED_EXCEPTION \(KeyError\)"):
        handle.result(timeout=5)


def test_workflows_show_prints_the_result(everbeat: Command, app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, [task("a")], output=0)
    flow.play(lambda _: {"total": 3})
    lines = everbeat("workflows", "show", str(handle.id)).assert_code(0).out.splitlines()
    assert 'result    {"total":3}' in lines
    assert any(line.startswith("ended at  ") for line in lines)


def test_workflows_show_keeps_failed_and_running_nodes_when_it_omits_lines(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    nodes = [task(f"n{number}") for number in range(150)]
    edges = [Edge(number, number + 1) for number in range(148)]
    handle, flow = sent(app, db, nodes, edges)
    flow.end(flow.claim(), lambda name: RuntimeError("torn") if name == "n149" else 1)
    flow.settle_down()
    answer = everbeat("workflows", "show", str(handle.id)).assert_code(0)
    lines = answer.out.partition("\nNodes\n")[2].splitlines()
    assert len(lines) == 61
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["n1", "ENQUEUED"], ["n149", "FAILED"], ["n0", "COMPLETED"]
    ]  # fmt: skip
    assert answer.err == "90 lines are left out; failed and running nodes come first.\n"
    drawn = everbeat("workflows", "show", str(handle.id), "--graph").assert_code(0).out
    assert drawn.splitlines()[-1] == "… and 90 more nodes, which are not drawn"


def test_workflows_show_draws_a_graph_that_fits_the_terminal(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    handle, flow = sent(app, db, ORDER, EDGES)
    flow.end([each for each in flow.claim(2_000) if flow.names()[each.id] == "reserve"], lambda _: 1)
    flow.settle_down()
    db.start(*db.claim())
    lines = everbeat("workflows", "show", str(handle.id), "--graph").assert_code(0).out.splitlines()
    assert lines[0] == f"order  {handle.id}  RUNNING"
    assert all(len(line) <= 80 for line in lines)
    drawn = "\n".join(lines)
    for said in (
        "✓ reserve",
        "● │ charge  RUNNING",
        "measure[0..1199]  1,200 RUNNING",
        "waits for charge (RUNNING ",
    ):
        assert said in drawn
    narrow = everbeat("workflows", "show", str(handle.id), "--graph", COLUMNS="60").assert_code(0).out
    assert all(len(line) <= 60 for line in narrow.splitlines()[1:])
    plain = everbeat("workflows", "show", str(handle.id), "--graph", PYTHONIOENCODING="ascii").assert_code(0)
    assert plain.out.isascii()
    assert "+ reserve" in plain.out


def test_workflows_show_draws_mermaid_and_svg(everbeat: Command, app: App, db: StoreHarness) -> None:
    handle, _flow = sent(app, db, ORDER, EDGES)
    text = everbeat("workflows", "show", str(handle.id), "--mermaid").assert_code(0).out
    assert text.startswith("flowchart TD\n")
    assert text.count("-->") == 4
    assert "measure#91;0..1199#93;" in text
    file = Path(everbeat.folder, "order.svg")
    told = everbeat("workflows", "show", str(handle.id), "--svg", "order.svg").assert_code(0)
    assert (told.out, told.err) == ("", "Drew 5 boxes into order.svg.\n")
    picture = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == 5
    piped = everbeat("workflows", "show", str(handle.id), "--svg", "-").assert_code(0).out
    assert ElementTree.fromstring(piped).get("width") == picture.get("width")
    missing = everbeat("workflows", "show", str(handle.id), "--svg", "no/such/order.svg")
    assert "no/such/order.svg cannot be written" in missing.assert_code(ExitCode.USAGE).err
    both = everbeat("workflows", "show", str(handle.id), "--mermaid", "--graph").assert_code(ExitCode.USAGE)
    assert "--graph and --mermaid" in both.err


def test_commands_pause_resume_cancel_and_retry_workflows(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    one, _ = sent(app, db, [task("a"), task("b")], [Edge(0, 1)])
    other, _ = sent(app, db, [task("a")])
    unknown = str(uuid4())
    answer = everbeat("workflows", "pause", str(one.id), unknown, str(other.id)).assert_code(
        ExitCode.NOT_FOUND
    )
    assert answer.out == f"{one.id}  PAUSED\n{other.id}  PAUSED\n"
    assert f"Workflow {unknown} does not exist" in answer.err
    assert one.status() == "PAUSED"
    resumed = everbeat("workflows", "resume", str(one.id), "--json").assert_code(0).document
    assert resumed == {"workflows": [{"id": str(one.id), "state": "RUNNING"}]}
    refused = everbeat("workflows", "retry", str(one.id)).assert_code(ExitCode.FAILED)
    assert "only FAILED, CANCELLED and PAUSED workflows can be retried" in refused.err
    assert everbeat("workflows", "cancel", str(one.id)).assert_code(0).out == f"{one.id}  CANCELLED\n"
    assert everbeat("workflows", "retry", str(one.id)).assert_code(0).out == f"{one.id}  RUNNING\n"
    assert [node.state for node in one.nodes()] == ["ENQUEUED", "PENDING"]


@pytest.mark.parametrize("word", ["show", "pause", "resume", "cancel", "retry"])
def test_workflow_commands_refuse_unknown_and_invalid_ids(everbeat: Command, app: App, word: str) -> None:
    missing = everbeat("workflows", word, str(uuid4())).assert_code(ExitCode.NOT_FOUND)
    assert "does not exist" in missing.err
    wrong = everbeat("workflows", word, "first").assert_code(ExitCode.USAGE)
    assert "must be an id" in wrong.err


def test_workflows_reconcile_reports_and_repairs_stuck_workflows(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    handle, flow = sent(app, db, [task("a"), task("b")], [Edge(0, 1)])
    nothing = everbeat("workflows", "reconcile").assert_code(0)
    assert (nothing.out, nothing.err) == ("", "Nothing is stuck.\n")
    (claimed,) = flow.claim()
    flow.end([claimed], lambda _: 1)
    db.connection.execute(db.plain("delete from {schema}.outbox"))
    dry = everbeat("workflows", "reconcile", "--dry-run").assert_code(0)
    line = dry.out.splitlines()[1]
    assert line.split()[:4] == [str(handle.id), "order", "a", "TASK_ENDED:"]
    assert "TASK_ENDED: its task has ended or was deleted" in line
    assert line.split()[-1] == str(claimed.id)
    assert dry.err == "Dry run: 1 step would be repaired.\n"
    document = everbeat("workflows", "reconcile", "--json").assert_code(0).document
    assert document["dry_run"] is False
    assert [each["what"] for each in document["stuck"]] == ["TASK_ENDED"]
    assert [node.state for node in handle.nodes()] == ["COMPLETED", "ENQUEUED"]
    assert everbeat("workflows", "reconcile").assert_code(0).err == "Nothing is stuck.\n"


def test_explain_accepts_the_id_of_a_workflow(everbeat: Command, app: App, db: StoreHarness) -> None:
    handle, _flow = sent(app, db, [task("a"), task("b")], [Edge(0, 1)])
    told = everbeat("explain", str(handle.id)).assert_code(0).out
    assert told.startswith(f"workflow  {handle.id}\nname      order\nstate     RUNNING\n")
    assert "\nIN_LINE  node a is ENQUEUED: its task waits because it is due" in told
    assert "\nWAITS_FOR_NODES  node b is PENDING and waits for a (ENQUEUED)\n" in told
    change(db, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
    document = everbeat("explain", str(handle.id), "--json").assert_code(0).document["explanation"]
    assert (document["workflow_id"], document["left_out"]) == (str(handle.id), 0)
    assert document["reasons"][0]["code"] == "NO_WORKER"
    assert "Task" in everbeat("explain", str(uuid4())).assert_code(ExitCode.NOT_FOUND).err

    (task_id,) = (str(node.task_id) for node in handle.nodes() if node.name == "a")
    of_task = everbeat("explain", task_id).assert_code(0).out.splitlines()
    assert f"workflow  {handle.id} (order)" in of_task
    assert "node      a" in of_task


def test_tasks_list_filters_by_workflow_and_names_the_node(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    handle, _flow = sent(app, db, [task("a"), task("b")], [Edge(0, 1)])
    db.send()
    found = everbeat("tasks", "list", "--workflow", str(handle.id), "--json").assert_code(0).document["tasks"]
    assert [(each["workflow_id"], each["node"]) for each in found] == [(str(handle.id), "a")]
    page = everbeat("tasks", "show", found[0]["id"]).assert_code(0).out
    assert str(handle.id) in page
    assert any(line.split() == ["node", "a"] for line in page.splitlines())
    wrong = everbeat("tasks", "list", "--workflow", "first").assert_code(ExitCode.USAGE)
    assert "--workflow" in wrong.err
