"""The other pages: queues, inbox, audit and system; and all pages with no row, with long names, and with the database away."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable

import httpx
import psycopg
import pytest

from everbeat import App, Limit
from everbeat.domain.series import OTHER_NAME
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import DatabaseReadOnly
from everbeat.store import reading, tasks
from everbeat.store.plan import ask
from everbeat.store.workers import WorkerRow, register_worker
from everbeat.web import Web
from everbeat.web.routes import ROUTES
from tests.conftest import NewServer
from tests.stories.pooler import pooled
from tests.web.conftest import HOST, NewVisitor, Visitor, Workers, by_header

PAGES = [
    route.path
    for route in ROUTES
    if route.method == "GET"
    and "{" not in route.path
    and route.path not in ("/", "/find")
    and not route.path.endswith(
        ("/stream", "/export")
    )  # a stream does not end, and an export is of one incident
]
LONG = "n" * 200


async def until(look: Callable[[], object]) -> None:
    """Wait until the function returns something true."""
    async with asyncio.timeout(20):
        while not look():
            await asyncio.sleep(0.02)  # no event reports the end of the thread


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_without_any_row_says_so_in_one_sentence(
    path: str, new_visitor: NewVisitor
) -> None:  # O2
    visitor = new_visitor()
    page = await visitor.get(path)
    assert page.status_code == 200, page.text
    (heading,) = re.findall("<h1[^>]*>(.*?)</h1>", page.text, re.DOTALL)
    document = await visitor.json(path)
    assert document["missing"] == []
    assert document["says"]
    assert re.sub(r"\d", "", heading).strip()
    assert page.text.count("<main") == 1


async def test_pages_hold_names_of_two_hundred_characters(
    app: App, workers: Workers, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:  # O2
    workers.send(LONG, queue="q" * 63, key="k" * 200)
    await app.apause_queue("q" * 63, reason="r" * 300)
    visitor = new_visitor()
    for path in PAGES:
        assert (await visitor.get(path)).status_code == 200
    page = (await visitor.get("/queues")).text
    assert "q" * 63 in page
    assert "r" * 300 in page


async def test_the_queue_whose_oldest_task_waits_longest_is_in_the_heading(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.send(queue="films")
    workers.send(queue="mail", delay_ms=3_600_000)
    visitor = new_visitor()
    assert (
        "<h1>films waits longest: its oldest due task has waited for" in (await visitor.get("/queues")).text
    )
    document = await visitor.json("/queues")
    assert {each["name"]: (each["pending"], each["scheduled"]) for each in document["queues"]} == {
        "default": (0, 0),  # the app has a task function in it
        "films": (1, 0),
        "mail": (0, 1),
    }


async def test_a_served_queue_that_never_had_a_task_is_listed_and_can_be_paused(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.db.run(
        register_worker(
            WorkerRow(
                id="w3", supervisor_id="s1", hostname="h", pid=9, process_started=None, queues=("idle",)
            )
        )
    )
    visitor = new_visitor("operate")
    page = (await visitor.get("/queues")).text
    assert 'name="name" value="idle"' in page
    await visitor.act("/queues/pause", name="idle")
    workers.db.connection.execute(
        workers.db.plain("update {schema}.workers set ended_at = now(), ended_how = 'left'")
    )
    listed = [each["name"] for each in (await visitor.json("/queues"))["queues"]]
    assert "idle" in listed  # it is paused
    assert [each.name for each in await app.aqueues()] == listed


async def test_a_queue_that_is_empty_but_ran_tasks_a_moment_ago_is_listed_and_can_be_paused(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    insert = (
        "insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed)"
        " values (60, date_trunc('minute', now()), %s, 'done', 's1', 3, 3)"
    )
    for queue in ("drained", OTHER_NAME):
        workers.db.connection.execute(workers.db.plain(insert), [queue])
    visitor = new_visitor("operate")
    found = await visitor.json("/queues")
    listed = {each["name"]: each["pending"] for each in found["queues"]}
    assert (listed["drained"], OTHER_NAME in listed) == (0, False)
    assert "drained is paused" in await visitor.act("/queues/pause", name="drained")


async def test_a_queue_is_paused_with_a_reason_and_resumed(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    workers.send(queue="mail")
    visitor = new_visitor("operate")
    assert "mail is paused" in await visitor.act("/queues/pause", name="mail", reason="the bank is down")
    (pause,) = await app.alist_pauses()
    assert (pause.name, pause.reason) == ("mail", "the bank is down")
    seen_by_another = (await new_visitor("see").get("/queues")).text
    assert "the bank is down" in seen_by_another
    assert "mail is resumed" in await visitor.act("/queues/resume", name="mail")
    assert await app.alist_pauses() == []
    assert "Everything is paused" in await visitor.act("/queues/pause", kind="all")
    assert "<h1>Everything is paused" in (await visitor.get("/queues")).text
    await visitor.act("/queues/resume", kind="all")
    entries = await app.aaudit_log()
    assert [(each.action, each.target, each.origin) for each in entries] == [
        ("resume", "everything", "web"),
        ("pause", "everything", "web"),
        ("resume", "queue mail", "web"),
        ("pause", "queue mail", "web"),
    ]
    unknown = await visitor.post("/queues/pause", name="mial")
    assert unknown.status_code == 404
    assert "mail" in unknown.text


async def test_a_limit_shows_who_holds_its_permits(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    limited = App(
        app._database.address.portable,
        schema=app.schema,
        limits=[Limit("stripe", concurrency=5)],
        auto_migrate=False,
    )

    @limited.task(name="refund", limits=["stripe"])
    def refund() -> None: ...

    sent = await asyncio.to_thread(refund.send)
    (claimed,) = workers.db.claim("w1", names=("refund",), starts=10)
    assert claimed.id == sent.id
    limited.close()
    visitor = new_visitor()
    page = (await visitor.get("/queues")).text
    assert "<b>1 held</b>, 4 free" in page
    assert f'href="/tasks/{sent.id}"' in page
    assert "has its new numbers" in await visitor.act(
        "/limits/set", name="stripe", concurrency="2", rate="10/1m", until="2h", reason="an incident"
    )
    page = (await visitor.get("/queues")).text
    assert "<b>1 held</b>, 1 free" in page
    assert "an incident" in page
    for wrong in ({"concurrency": "-1"}, {"rate": "often"}, {"until": "soon", "burst": "1"}, {}):
        assert (await visitor.post("/limits/set", name="stripe", **wrong)).status_code == 400
    assert (
        await new_visitor("operate").post("/limits/set", name="stripe", concurrency="9")
    ).status_code == 403
    assert "numbers of the code" in await visitor.act("/limits/clear", name="stripe")
    assert (await app.alimit_info("stripe")).numbers.concurrency == 5
    assert [(each.action, each.actor, each.target) for each in await app.aaudit_log()] == [
        ("clear_limit", "admin-user", "stripe"),
        ("set_limit", "admin-user", "stripe"),
    ]


async def test_a_question_is_answered_in_its_form_and_only_once(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    asking = workers.ask("Refund <b>300</b> EUR?", kind="bool", note="order 7")
    choosing = workers.ask("Which?", kind="str", choices=["refund", "replace"])
    visitor = new_visitor("operate")
    page = (await visitor.get("/inbox")).text
    assert "<h1>2 questions wait for an answer" in page
    assert "Refund &lt;b&gt;300&lt;/b&gt; EUR?" in page
    assert '<button class="btn" name="value" value="replace">' in page
    assert (await visitor.post(f"/inbox/{choosing}", value="keep")).status_code == 400
    assert "The answer is stored" in await visitor.act(f"/inbox/{asking}", value="true", step="refund")
    (left,) = (await visitor.json("/inbox"))["questions"]
    assert left["task_id"] == str(choosing)
    again = await visitor.post(f"/inbox/{asking}", value="false", step="refund")
    assert again.status_code == 409
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.target, entry.actor) == ("answer", str(asking), "operate-user")
    for blind in (new_visitor("see"), new_visitor("admin", hide=["charge"])):
        shown = await blind.get("/inbox")
        assert "Which?" not in shown.text
        assert "replace" not in shown.text
        assert "Which?" not in json.dumps(await blind.json("/inbox"))
    assert (
        await new_visitor("admin", hide=["charge"]).post(f"/inbox/{choosing}", value="refund")
    ).status_code == 403


async def test_an_action_on_all_that_match_can_be_stopped_from_the_audit_page(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.fail()
    action = await app.aretry_all(name="charge", by="ann")
    visitor = new_visitor("operate")
    page = (await visitor.get("/audit")).text
    assert "<h1>Retry all that match is going on: 0 done, 0 skipped</h1>" in page
    assert 'data-refresh="3"' in page
    await visitor.act(f"/audit/{action.id}/stop")
    (info,) = await app.abulk_actions()
    assert info.cancel_requested_at is not None
    assert (await visitor.json("/audit", actor="ann"))["entries"][0]["action"]
    assert (await visitor.json("/audit", actor="nobody"))["entries"] == []
    assert (await visitor.get("/audit", before="x")).status_code == 400


async def test_searched_texts_of_the_audit_log_are_hidden_from_those_who_see_no_payloads(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O3
    workers.fail(arguments={"card": "4242-secret"})
    await app.aretry_all(arguments_contain="4242-secret", by="ann")
    assert "4242-secret" in (await new_visitor("read").get("/audit")).text
    for visitor in (new_visitor("see"), new_visitor("admin", hide=["charge"])):
        assert "4242-secret" not in (await visitor.get("/audit")).text
        assert "4242-secret" not in json.dumps(await visitor.json("/audit"))


async def test_the_system_page_shows_the_checks_of_the_doctor_without_waiting_for_them(
    app: App, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor()
    first = await visitor.get("/system")
    assert "The first checks are running" in first.text
    assert 'data-refresh="2"' in first.text
    document = await visitor.json("/system")
    async with asyncio.timeout(30):
        while document["is_running"]:
            await asyncio.sleep(0.05)  # the checks run in a thread
            document = await visitor.json("/system")
    codes = {check["code"]: check["verdict"] for check in document["checks"]}
    assert codes["DATABASE"] == "OK"
    assert codes["SCHEMA"] == "OK"
    page = await visitor.get("/system")
    assert "examined" in page.text.lower()
    assert "data-refresh" not in page.text


async def test_pages_cannot_write_and_a_slow_part_is_named_while_the_rest_is_shown(
    app: App, workers: Workers, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:  # O2
    monkeypatch.setattr(reading, "SESSION", reading.SESSION.replace(b"5s", b"300ms"))
    web = Web(app, auth=by_header)
    pages = await web.reading()
    failed = workers.fail()
    with web.access.reading_from(pages), pytest.raises(DatabaseReadOnly):
        await web.access.arun(ask(tasks.cancel(failed, channel="x", call=failed)))
    visitor = new_visitor()
    await visitor.get("/queues")
    began_at = time.monotonic()
    with workers.db.connection.transaction():
        workers.db.connection.execute(workers.db.plain("lock table {schema}.pauses in access exclusive mode"))
        page = await visitor.get("/queues")
    assert time.monotonic() - began_at < 10
    assert page.status_code == 200
    assert "The pauses could not be read" in page.text
    assert 'id="h-queues"' in page.text
    await web.aclose()


@pytest.fixture
def own_server(new_server: NewServer) -> EmbeddedServer:
    """Return a server that the test can stop."""
    return new_server()


async def test_with_the_database_away_every_page_says_so_and_comes_back(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:  # O2
    app = App(own_server.url, auto_migrate="create")
    web = Web(app, auth=by_header)
    transport = httpx.ASGITransport(web, client=("203.0.113.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
        visitor = Visitor(client, {"x-test-role": "admin"})
        assert (await visitor.get("/tasks")).status_code == 200
        own_server.stop("immediate")
        for path in ("/tasks", "/queues", "/system"):
            began_at = time.monotonic()
            page = await visitor.get(path)
            assert time.monotonic() - began_at < 8
            assert page.status_code in (200, 503)
            assert path == "/system" or "could not be read" in page.text
        assert "database away" in page.text
        document = await visitor.json("/queues")
        assert {each["part"] for each in document["missing"]} >= {"The queues", "The pauses"}
        folder = own_server.url.partition("host=")[2].partition("&")[0]
        assert folder in str(document), "an operator reads where the database is"
        for role, path, kind in (
            ("see", "/pulse", "text/html"),
            ("read", "/queues", "application/json"),
            ("read", "/system", "application/json"),
        ):
            answer = await client.get(path, headers={"x-test-role": role, "accept": kind})
            assert answer.status_code in (200, 503), answer.text
            assert not re.search(rf"{folder}|postgres|port \d", answer.text), (role, path, answer.text)
        streamed = (await Visitor(client, {"x-test-role": "see"}).get("/pulse/stream", once="1")).text
        assert '"problem":"The database cannot be reached."' in streamed
        assert folder not in streamed
        assert folder in caplog.text, "the log keeps the cause"
    await web.aclose()
    await app.aclose()


@pytest.mark.long
async def test_behind_a_transaction_pooler_pages_only_read_and_their_statements_end(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:  # O2
    monkeypatch.setattr(reading, "_TRANSACTION", reading._TRANSACTION.replace(b"5s", b"300ms"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = new_server(tcp_port=port)
    with pooled(server.tcp_url) as url, psycopg.connect(server.tcp_url) as direct:
        app = App(url, auto_migrate="create")
        web = Web(app, auth=by_header)
        sent = await app.asend_by_name("charge", {})
        pages = await web.reading()
        transport = httpx.ASGITransport(web, client=("203.0.113.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            visitor = Visitor(client, {"x-test-role": "operate"})
            assert str(sent.id) in (await visitor.get("/tasks")).text
            with web.access.reading_from(pages), pytest.raises(DatabaseReadOnly):
                await web.access.arun(ask(tasks.cancel(sent.id, channel="x", call=sent.id)))
            with direct.transaction():
                direct.execute("lock table everbeat.pauses in access exclusive mode")
                assert "The pauses could not be read" in (await visitor.get("/queues")).text
            assert "The task is cancelled" in await visitor.act(f"/tasks/{sent.id}/cancel")
        await web.aclose()
        await app.aclose()
