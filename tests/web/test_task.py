"""The page of one task: its lanes and records, hostile and hidden values, and its actions."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from html import unescape
from uuid import UUID, uuid4

import pytest

from everbeat import App
from everbeat.domain.task.captured_log import LogLine, UnwrittenPart
from everbeat.domain.task.context_backend import EmittedItem
from everbeat.store import attempt_logs, leases
from everbeat.store.attempt_logs import LogPlace
from everbeat.store.claims import Claimed
from everbeat.store.streams import insert_items
from tests.web.conftest import NewVisitor, Workers

AT = datetime(2030, 1, 1, tzinfo=UTC)
HOSTILE = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>{{ 1234*4321 }}\u202e"


async def test_the_page_begins_with_the_reason_and_shows_the_attempt_as_a_lane(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    running = workers.start("charge", key="k-1", arguments={"order": "o-1"})
    visitor = new_visitor()
    page = await visitor.get(f"/tasks/{running.id}")
    assert page.status_code == 200
    assert '<h1 class="anywhere">charge' in page.text
    assert "runs attempt 1" in page.text
    assert page.text.count('class="lane-row h2"') == 1
    assert "o-1" in page.text
    document = await visitor.json(f"/tasks/{running.id}")
    assert document["task"]["state"] == "RUNNING"
    assert document["explanation"]["reasons"][0]["code"] == "RUNNING"
    assert document["missing"] == []


async def test_a_task_that_does_not_exist_is_not_found(new_visitor: NewVisitor) -> None:
    visitor = new_visitor()
    assert (await visitor.get(f"/tasks/{uuid4()}")).status_code == 404
    assert (await visitor.get("/tasks/nonsense")).status_code == 404
    assert (await visitor.json(f"/tasks/{uuid4()}", status=404))["error"]["code"] == "TASK_NOT_FOUND"


async def test_hostile_names_arguments_and_errors_are_shown_as_text(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    name = "<b>bold</b>\"onmouseover='x'"
    error = {
        "code": HOSTILE,
        "message": HOSTILE,
        "type": HOSTILE,
        "traceback": HOSTILE,
        "data": {HOSTILE: HOSTILE},
    }
    labels = json.dumps({"tenant": HOSTILE})
    failed = workers.fail(name, arguments={HOSTILE: HOSTILE}, error=error, key=HOSTILE, labels=labels)
    visitor = new_visitor()
    for path in ("/tasks", "/tasks?state=FAILED", f"/tasks/{failed}"):
        page = await visitor.get(path)
        assert page.status_code == 200
        for dangerous in ("<script>alert", "<img src=x", "<b>bold", "\u202e", "5332114"):
            assert dangerous not in page.text, (path, dangerous)
        assert "<script>alert('x')</script>" in unescape(page.text)
        assert "\\u202e" in page.text
    assert (await visitor.json(f"/tasks/{failed}"))["task"]["arguments"] == {HOSTILE: HOSTILE}


SECRET = "4242-secret-4242"


async def test_hidden_payloads_are_in_no_response(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    def everywhere(code: str) -> dict[str, object]:
        return {
            "code": code, "message": f"declined {SECRET}", "type": "shop.Declined",
            "traceback": f"Traceback: {SECRET}", "data": {"card": SECRET},
        }  # fmt: skip

    arguments = {"order": "o-1", "nested": [{"card": SECRET}]}
    failed = workers.fail("charge", arguments=arguments, error=everywhere("DECLINED"))
    running = workers.start("charge", arguments=arguments)
    progress = json.dumps({"stage": SECRET, "message": SECRET}).encode()
    assert workers.db.run(leases.record_progress(running.id, running.claim_id, progress))
    retried = workers.start("charge", arguments=arguments)
    workers.db.settle(
        retried, "FAILED", error=json.dumps(everywhere("DECLINED")).encode(), retry_in_ms=3_600_000
    )
    workers.db.connection.execute(
        workers.db.plain(
            "insert into {schema}.steps (task_id, kind, name, result, attempt) values (%s, 'step', 'pay', %s::json, 1)"
        ),
        [running.id, json.dumps({"card": SECRET})],
    )
    paths = ["/tasks", "/tasks?state=FAILED", *(f"/tasks/{one}" for one in (failed, running.id, retried.id))]
    clear = new_visitor("read")
    assert all([SECRET in (await clear.get(path)).text for path in paths if "/tasks/" in path])
    for visitor in (
        new_visitor("see"),
        new_visitor("admin", hide=["charge"]),
        new_visitor("admin", hide=["*:card"]),
        new_visitor("admin", hide=["ch*:c?rd"]),
    ):
        for path in paths:
            assert SECRET not in (await visitor.get(path)).text, path
            document = json.dumps(await visitor.json(path.partition("?")[0]))
            assert SECRET not in document, (path, document[document.index(SECRET) - 200 :][:300])
    partly = (await new_visitor("admin", hide=["*:card"]).json(f"/tasks/{failed}"))["task"]
    assert partly["arguments"] == {"order": "o-1", "nested": [{"card": "hidden"}]}
    assert (partly["error"]["code"], partly["error"]["message"]) == ("DECLINED", "hidden")


async def test_the_handler_of_a_failure_shows_nothing_that_is_hidden_of_the_failed_task(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    policy = json.dumps(
        {"on_failure": {"name": "notify", "parameter": "failure", "queue": "default", "policy": "{}"}}
    )
    error = {"code": "DECLINED", "message": SECRET, "traceback": SECRET, "data": {"a": SECRET}}
    workers.fail("charge", arguments={"order": "o-1", "card": SECRET}, error=error, policy=policy.encode())
    found = workers.db.connection.execute(
        workers.db.plain("select id from {schema}.tasks where name = 'notify'")
    ).fetchone()
    assert found is not None
    path = f"/tasks/{found[0]}"
    for clear in (new_visitor("admin"), new_visitor("admin", hide=["other"])):
        assert SECRET in (await clear.get(path)).text
    for rule in ("charge", "charge:card", "*:card", "notify"):
        visitor = new_visitor("admin", hide=[rule])
        assert SECRET not in (await visitor.get(path)).text, rule
        assert SECRET not in json.dumps(await visitor.json(path)), rule
    shown = (await new_visitor("admin", hide=["charge:card"]).json(path))["task"]["arguments"]["failure"]
    assert shown["arguments"] == {"order": "o-1", "card": "hidden"}
    assert shown["error"] == {"code": "DECLINED", "message": "hidden", "type": "shop.Refused"}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("shop:charge", "shop:charge"),
        ("shop:charge", "shop:*"),
        ("charge[1]", "charge[1]"),
        ("charge[1]", "charge[1]:c*"),
    ],
)
async def test_rules_match_names_with_colons_and_brackets(
    name: str, rule: str, workers: Workers, new_visitor: NewVisitor
) -> None:
    sent = workers.send(name, arguments={"card": SECRET, "order": "o-1"})
    assert SECRET in (await new_visitor("admin", hide=["other", "shop:other"]).get(f"/tasks/{sent}")).text
    assert SECRET not in (await new_visitor("admin", hide=[rule]).get(f"/tasks/{sent}")).text


async def test_the_actions_of_a_task_change_its_row_and_leave_an_audit_row(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    failed, scheduled, running = workers.fail(), workers.send(delay_ms=3_600_000), workers.start("charge")
    visitor = new_visitor("operate")
    assert "The task will run again" in await visitor.act(f"/tasks/{failed}/retry")
    assert (await app.ainfo(failed)).state == "PENDING"
    assert "The task is due now" in await visitor.act(f"/tasks/{scheduled}/run_now")
    assert "asked to stop the task" in await visitor.act(f"/tasks/{running.id}/cancel")
    assert (await app.ainfo(running.id)).cancel_requested_at is not None
    assert "The signal is stored" in await visitor.act(
        f"/tasks/{running.id}/signal", name="go", value='{"by": "ann"}'
    )
    entries = await app.aaudit_log()
    assert [(each.action, each.actor, each.origin) for each in entries] == [
        (action, "operate-user", "web") for action in ("signal", "cancel", "run_now", "retry")
    ]
    refused = await visitor.post(f"/tasks/{failed}/retry")
    assert refused.status_code == 409
    assert (await visitor.post(f"/tasks/{running.id}/signal", name="go", value="{")).status_code == 400
    assert len(await app.aaudit_log()) == 4


async def test_a_task_is_sent_again_with_other_arguments(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    failed = workers.fail("charge", arguments={"order": "o-1", "card": "4242"}, queue="bank")
    unknown = workers.fail("nobody.knows", arguments={})
    visitor = new_visitor("operate")
    page = (await visitor.get(f"/tasks/{failed}")).text
    assert "everbeat send charge --args" in page
    sent = await visitor.act(f"/tasks/{failed}/send", arguments='{"order": "o-2", "card": "4343"}')
    assert "The task is sent again" in sent
    (new,) = [task for task in await app.alist_tasks(name="charge") if task.id != failed]
    assert (new.queue, (await app.ainfo(new.id)).arguments["order"]) == ("bank", "o-2")
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.target, entry.note) == (
        "send",
        "operate-user",
        str(new.id),
        f"again, after {failed}",
    )
    for wrong in ("{", "[1]", '{"colour": 1}'):
        assert (await visitor.post(f"/tasks/{failed}/send", arguments=wrong)).status_code == 400
    assert (await visitor.post(f"/tasks/{unknown}/send", arguments="{}")).status_code == 409
    hidden = new_visitor("admin", hide=["charge:card"])
    assert "everbeat send" not in (await hidden.get(f"/tasks/{failed}")).text
    assert (await hidden.post(f"/tasks/{failed}/send", arguments="{}")).status_code == 409
    assert len(await app.alist_tasks(name="charge")) == 2


async def test_the_items_of_a_stream_have_a_page_that_hides_them_by_role(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    running = workers.start("charge")
    items = [EmittedItem("tokens", number, json.dumps(f"{SECRET} {number}")) for number in range(1, 151)]
    lease = (running.id, running.claim_id)
    workers.db.run(insert_items([(lease, items)], channel=workers.db.target.channel))
    path, reader = f"/tasks/{running.id}/items", new_visitor("read")
    assert f'href="{path}?name=tokens"' in (await reader.get(f"/tasks/{running.id}")).text
    first = await reader.json(path, name="tokens")
    assert [each["number"] for each in first["items"]] == list(range(1, 101))
    assert first["items"][0]["value"] == f"{SECRET} 1"
    page = await reader.get(path, name="tokens")
    assert f'href="{path}?name=tokens&amp;after=100"' in page.text
    rest = await reader.json(path, name="tokens", after="100")
    assert [each["number"] for each in rest["items"]] == list(range(101, 151))
    for blind in (new_visitor("see"), new_visitor("admin", hide=["charge:card"])):
        assert SECRET not in (await blind.get(path)).text
        assert SECRET not in json.dumps(await blind.json(path, name="tokens"))
    assert (await reader.get(path, after="x")).status_code == 400
    assert (await reader.get(f"/tasks/{UUID(int=7)}/items")).status_code == 404


def logged(workers: Workers, held: Claimed, *messages: str, attempt: int = 1) -> None:
    """Store lines as the worker of an attempt does."""
    lines = [
        LogLine(number, AT, "INFO", "shop", message, message if number == 1 else None)
        for number, message in enumerate(messages, 1)
    ]
    part = UnwrittenPart(0, lines)
    workers.db.run(attempt_logs.write_parts([(LogPlace(held.id, attempt, held.claim_id), part)]))


async def test_captured_logs_are_shown_newest_attempt_first_and_as_text(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    running = workers.start("charge")
    for attempt in range(1, 6):
        logged(workers, running, HOSTILE, *(f"line {n}" for n in range(2, 260)), attempt=attempt)
    page = (await new_visitor().get(f"/tasks/{running.id}")).text
    assert re.findall(r"<summary>(Attempt \d)</summary>", page) == ["Attempt 5", "Attempt 4", "Attempt 3"]
    assert page.count("… 59 lines not shown …") == 3
    assert "line 259" in page
    assert f"everbeat logs {running.id}" in page
    logged(workers, running, HOSTILE, attempt=6)
    page = (await new_visitor().get(f"/tasks/{running.id}")).text
    for dangerous in ("<script>alert", "<img src=x", "\u202e", "5332114"):
        assert dangerous not in page, dangerous
    assert "<script>alert('x')</script>" in unescape(page)
    document = await new_visitor().json(f"/tasks/{running.id}")
    assert [log["attempt"] for log in document["logs"]] == [4, 5, 6]
    (line,) = document["logs"][-1]["lines"]
    assert (line["message"], line["exception"], line["missing"]) == (HOSTILE, HOSTILE, 0)


async def test_captured_logs_are_hidden_with_the_payloads(
    workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    running = workers.start("charge")
    logged(workers, running, SECRET)
    path = f"/tasks/{running.id}"
    assert (await new_visitor("read").get(path)).text.count(SECRET) == 2
    for visitor in (new_visitor("see"), new_visitor("admin", hide=["*:card"])):
        assert SECRET not in (await visitor.get(path)).text
        document = await visitor.json(path)
        assert SECRET not in json.dumps(document)
        assert [line["message"] for log in document["logs"] for line in log["lines"]] == ["hidden"]
