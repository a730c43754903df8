"""Values that break readers: numbers of thousands of digits, JSON of thousands of levels, and arguments that nothing can parse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.conftest import SAME_ORIGIN, NewVisitor, Workers

DIGITS = "9" * 5_000
LEVELS = "[" * 20_000
SECRET = "4111-secret"


@pytest.mark.parametrize("path", ["/tasks", "/audit"])
async def test_a_limit_of_thousands_of_digits_is_refused(
    workers: Workers, new_visitor: NewVisitor, path: str
) -> None:
    found = await new_visitor("see").json(path, status=400, limit=DIGITS)
    assert found["error"]["code"] == "OUT_OF_RANGE"


async def test_a_place_of_thousands_of_digits_in_a_stream_is_refused(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    sent = workers.send()
    found = await new_visitor("see").json(f"/tasks/{sent}/items", status=400, after=DIGITS)
    assert found["error"]["code"] == "WRONG_FORM"


@pytest.mark.parametrize("body", [LEVELS, '{"value": ' + LEVELS], ids=["alone", "in a field"])
async def test_a_body_of_thousands_of_levels_is_refused(
    workers: Workers, new_visitor: NewVisitor, body: str
) -> None:
    visitor = new_visitor("operate")
    headers = {**visitor.headers, **SAME_ORIGIN, "content-type": "application/json"}
    answer = await visitor.client.post(f"/tasks/{workers.send()}/signal", headers=headers, content=body)
    assert (answer.status_code, "not a JSON object" in answer.text) == (400, True)


async def test_a_value_of_thousands_of_levels_is_refused_or_is_a_text(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    signalled = await visitor.post(f"/tasks/{workers.send()}/signal", name="n", value=LEVELS)
    assert (signalled.status_code, "The value is not JSON" in signalled.text) == (400, True)
    failed = workers.fail()
    again = await visitor.post(f"/tasks/{failed}/send", arguments=LEVELS)
    assert (again.status_code, "The arguments are not JSON" in again.text) == (400, True)
    asking = workers.ask("Refund?", kind="int")
    answered = await visitor.post(f"/inbox/{asking}", value=LEVELS)
    assert answered.status_code == 400, answered.text


@pytest.mark.parametrize(
    "stored",
    [
        '{"card": "' + SECRET + '", "size": 1e999}',
        '["' + SECRET + '"]',
        '{"card": "' + SECRET + '", "deep": ' + "[" * 3_000 + "]" * 3_000 + "}",
        '{"deep": ' + '{"a":' * 700 + '{"card": "' + SECRET + '"}' + "}" * 700 + "}",
    ],
    ids=[
        "a number that is too large",
        "a list",
        "more levels than a reader takes",
        "more levels than a rule takes",
    ],
)
async def test_arguments_that_cannot_be_read_are_hidden_by_a_rule_about_one_of_them(
    workers: Workers, new_visitor: NewVisitor, stored: str
) -> None:
    sent = workers.db.send("charge", args=stored.encode())
    visitor = new_visitor("admin", hide=["*:card"])
    page = await visitor.get(f"/tasks/{sent}")
    assert (page.status_code, SECRET in page.text) == (200, False)
    found: Any = await visitor.json(f"/tasks/{sent}")
    assert SECRET not in str(found)


async def test_arguments_that_cannot_be_read_cannot_be_sent_again(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    sent = workers.db.send("charge", args=b'{"card": "c", "size": 1e999}')
    visitor = new_visitor("operate")
    assert "Send again" not in (await visitor.get(f"/tasks/{sent}")).text
    assert (await visitor.post(f"/tasks/{sent}/send", arguments='{"order": "o"}')).status_code == 409


HIDING = "x\u202ey\u2066\x1b[31m\u200b<b>\"'"
"""A name that reverses, hides or colors the text around it, or is markup, if a page shows it as it is."""


async def test_no_drawing_contains_characters_that_hide_or_reverse_text(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    db = workers.db
    workers.start(HIDING)
    (lease,) = db.leases()
    db.recover(lease, "retry", noticed_by="session")
    for text in (
        "update {schema}.recoveries set cause = %(name)s, hook = %(name)s",
        "update {schema}.supervisors set slot = %(name)s, hostname = %(name)s, start_problem = %(name)s",
        "update {schema}.workers set hostname = %(name)s",
        "update {schema}.workers set ended_cause = %(name)s, ended_at = now(), ended_how = 'child_exit' where id = 'w2'",
        "insert into {schema}.audit_log (at, actor, origin, action, target, note, outcome)"
        " values (now() - interval '1 minute', %(name)s, 'web', 'pause', %(name)s, %(name)s, 'completed')",
        "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)"
        " values (60, now() - interval '2 minutes', %(name)s, 5, 0, 0, 0, 0, 1, '{{}}')",
    ):
        db.connection.execute(db.plain(text), {"name": HIDING})
    visitor = new_visitor("admin")
    pages = [
        "/pulse",
        "/workers",
        "/recoveries",
        "/workers/w2",
        "/audit",
        "/queues",
        "/pulse/stream?once=1",
        "/recoveries/stream?once=1",
    ]
    for path in pages:
        page = await visitor.client.get(path, headers=visitor.headers)
        assert page.status_code == 200, path
        found = [hex(ord(each)) for each in page.text if each in "\u202e\u2066\x1b\u200b"]
        assert (found, "<b>\"'" in page.text) == ([], False), path
    pulse = (await visitor.get("/pulse")).text
    assert 'class="chart plot"' in pulse
    assert "\\u202e" in pulse.partition('class="chart plot"')[2]


async def test_a_certificate_of_a_newer_version_shows_no_field_that_this_version_does_not_know(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    held = workers.start()
    (lease,) = workers.db.leases()
    workers.db.recover(lease, "retry", noticed_by="session")
    certificate = {
        "code": "WORKER_CRASHED",
        "data": {"new": SECRET, "stage": SECRET, "last_progress": SECRET, "signal": "SIGKILL"},
    }
    workers.db.connection.execute(
        workers.db.plain("update {schema}.recoveries set certificate = %s"), [json.dumps(certificate)]
    )
    for visitor in (new_visitor("see"), new_visitor("admin", hide=["charge:card"])):
        for path in (
            "/recoveries",
            f"/tasks/{held.id}",
            "/recoveries/export?incident=s1",
            "/recoveries/export?incident=s1&as=json",
        ):
            for kind in ("application/json", "text/html"):
                answer = await visitor.client.get(path, headers={**visitor.headers, "accept": kind})
                assert SECRET not in answer.text, (path, kind)
        assert "SIGKILL" in (await visitor.get("/recoveries")).text
    shown = await new_visitor("admin").client.get(
        "/recoveries/export?incident=s1", headers={"x-test-role": "read"}
    )
    assert SECRET in shown.text
