"""`everbeat workflows`: lists, pages, drawings and commands, on workflows whose workers are played by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest

from everbeat import App, TaskError, TaskFailed
from everbeat.cli.exit_codes import ExitCode
from everbeat.domain.graph import Edge
from tests.cli.conftest import Command
from tests.client.conftest import app, hands
from tests.client.test_explaining import change
from tests.store.conftest import Hands
from tests.store.flows import after, task
from tests.workflows.sent import child, mapped, sent

__all__ = ["app", "hands"]

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


def test_workflows_are_filtered(everbeat: Command, app: App, hands: Hands) -> None:
    first, flow = sent(app, hands, [child("ship", task("fold"))], key="k1")
    flow.play()
    second, _ = sent(app, hands, [task("a")], name="refund")
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
    assert "There may be more" in more.err
    empty = everbeat("workflows", "--name", "other").assert_code(0)
    assert (empty.out, empty.err) == ("", "No workflow is like that.\n")
    assert "--state" in everbeat("workflows", "--state", "done").assert_code(ExitCode.USAGE).err
    assert "--limit" in everbeat("workflows", "--limit", "99999").assert_code(ExitCode.USAGE).err


def test_a_page_has_everything_and_folds_maps(everbeat: Command, app: App, hands: Hands) -> None:
    handle, flow = sent(app, hands, ORDER, EDGES, output=1204, key="k1")
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


def test_the_class_of_an_exception_is_shown_wherever_it_ended_something(
    everbeat: Command, app: App, hands: Hands
) -> None:  # J4
    handle, flow = sent(app, hands, [task("a"), child("ship", task("fold"))])
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


def test_a_result_is_on_the_page(everbeat: Command, app: App, hands: Hands) -> None:
    handle, flow = sent(app, hands, [task("a")], output=0)
    flow.play(lambda _: {"total": 3})
    lines = everbeat("workflows", "show", str(handle.id)).assert_code(0).out.splitlines()
    assert 'result    {"total":3}' in lines
    assert any(line.startswith("ended at  ") for line in lines)


def test_what_failed_or_runs_comes_first_where_lines_are_left_out(
    everbeat: Command, app: App, hands: Hands
) -> None:
    nodes = [task(f"n{number}") for number in range(150)]
    edges = [Edge(number, number + 1) for number in range(148)]
    handle, flow = sent(app, hands, nodes, edges)
    flow.end(flow.claim(), lambda name: RuntimeError("torn") if name == "n149" else 1)
    flow.settle_down()
    answer = everbeat("workflows", "show", str(handle.id)).assert_code(0)
    lines = answer.out.partition("\nNodes\n")[2].splitlines()
    assert len(lines) == 61
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["n1", "ENQUEUED"], ["n149", "FAILED"], ["n0", "COMPLETED"]
    ]  # fmt: skip
    assert answer.err == "90 lines are left out; what failed or runs comes first.\n"
    drawn = everbeat("workflows", "show", str(handle.id), "--graph").assert_code(0).out
    assert drawn.splitlines()[-1] == "… and 90 more nodes, which are not drawn"


def test_a_graph_fits_the_terminal_in_any_alphabet(everbeat: Command, app: App, hands: Hands) -> None:
    handle, flow = sent(app, hands, ORDER, EDGES)
    flow.end([each for each in flow.claim(2_000) if flow.names()[each.id] == "reserve"], lambda _: 1)
    flow.settle_down()
    hands.start(*hands.claim())
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


def test_a_drawing_is_mermaid_or_svg(everbeat: Command, app: App, hands: Hands) -> None:
    handle, _flow = sent(app, hands, ORDER, EDGES)
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


def test_workflows_are_paused_resumed_cancelled_and_retried(
    everbeat: Command, app: App, hands: Hands
) -> None:
    one, _ = sent(app, hands, [task("a"), task("b")], [Edge(0, 1)])
    other, _ = sent(app, hands, [task("a")])
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
def test_what_is_no_workflow_is_refused(everbeat: Command, app: App, word: str) -> None:
    missing = everbeat("workflows", word, str(uuid4())).assert_code(ExitCode.NOT_FOUND)
    assert "does not exist" in missing.err
    wrong = everbeat("workflows", word, "first").assert_code(ExitCode.USAGE)
    assert "must be a UUID" in wrong.err


def test_what_is_stuck_is_told_and_put_right(everbeat: Command, app: App, hands: Hands) -> None:
    handle, flow = sent(app, hands, [task("a"), task("b")], [Edge(0, 1)])
    nothing = everbeat("workflows", "reconcile").assert_code(0)
    assert (nothing.out, nothing.err) == ("", "Nothing is stuck.\n")
    (claimed,) = flow.claim()
    flow.end([claimed], lambda _: 1)
    hands.connection.execute(hands.plain("delete from {schema}.outbox"))
    dry = everbeat("workflows", "reconcile", "--dry-run").assert_code(0)
    assert dry.out.splitlines()[1].split() == [str(handle.id), "order", "a", "TASK_ENDED", str(claimed.id)]
    assert dry.err == "Dry run: 1 thing would be put right.\n"
    document = everbeat("workflows", "reconcile", "--json").assert_code(0).document
    assert document["dry_run"] is False
    assert [each["what"] for each in document["stuck"]] == ["TASK_ENDED"]
    assert [node.state for node in handle.nodes()] == ["COMPLETED", "ENQUEUED"]
    assert everbeat("workflows", "reconcile").assert_code(0).err == "Nothing is stuck.\n"


def test_explain_takes_workflows_too(everbeat: Command, app: App, hands: Hands) -> None:
    handle, _flow = sent(app, hands, [task("a"), task("b")], [Edge(0, 1)])
    told = everbeat("explain", str(handle.id)).assert_code(0).out
    assert told.startswith(f"workflow  {handle.id}\nname      order\nstate     RUNNING\n")
    assert "\nIN_LINE  node a is ENQUEUED: its task waits because it is due" in told
    assert "\nWAITS_FOR_NODES  node b is PENDING and waits for a (ENQUEUED)\n" in told
    change(hands, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
    document = everbeat("explain", str(handle.id), "--json").assert_code(0).document["explanation"]
    assert (document["workflow_id"], document["left_out"]) == (str(handle.id), 0)
    assert document["reasons"][0]["code"] == "NO_WORKER"
    assert "Task" in everbeat("explain", str(uuid4())).assert_code(ExitCode.NOT_FOUND).err

    (task_id,) = (str(node.task_id) for node in handle.nodes() if node.name == "a")
    of_task = everbeat("explain", task_id).assert_code(0).out.splitlines()
    assert f"workflow  {handle.id} (order)" in of_task
    assert "node      a" in of_task


def test_tasks_of_a_workflow_are_listed_and_say_so(everbeat: Command, app: App, hands: Hands) -> None:
    handle, _flow = sent(app, hands, [task("a"), task("b")], [Edge(0, 1)])
    hands.send()
    found = everbeat("tasks", "list", "--workflow", str(handle.id), "--json").assert_code(0).document["tasks"]
    assert [(each["workflow_id"], each["node"]) for each in found] == [(str(handle.id), "a")]
    page = everbeat("tasks", "show", found[0]["id"]).assert_code(0).out
    assert str(handle.id) in page
    assert any(line.split() == ["node", "a"] for line in page.splitlines())
    wrong = everbeat("tasks", "list", "--workflow", "first").assert_code(ExitCode.USAGE)
    assert "--workflow" in wrong.err
