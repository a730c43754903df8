"""The command that a page names as its equivalent in a terminal: it exists, and has these options."""

from __future__ import annotations

import html
import re
import shlex
from typing import Any

import pytest

from everbeat.cli.main import load_command
from tests.web.conftest import NewVisitor, Workers

PAGES = (
    "/pulse", "/recoveries", "/recoveries/sweep", "/workers", "/workers/w1", "/workers/s1", "/workers/w9", "/tasks", "/queues",
    "/tasks?state=FAILED&state=overdue&label=tenant%3D42&since=8h&name=charge", "/tasks/{task}", "/workflows", "/workflows/reconcile",
    "/schedules", "/inbox", "/system", "/audit",
)  # fmt: skip


def parse(line: str) -> None:
    """Parse a command line without running it. Raises the parser's error if it is wrong."""
    program, name, *words = shlex.split(line)
    assert program == "everbeat"
    command: Any = load_command(name)
    context = command.make_context(name, words)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    parse("everbeat workers --history w1")
    for wrong in ("everbeat workers states w1", "everbeat tasks list --stat failed"):
        with pytest.raises(Exception, match="stat"):
            parse(wrong)


async def test_each_page_names_a_command_that_exists(workers: Workers, new_visitor: NewVisitor) -> None:
    db = workers.db
    held = db.running("w1")
    db.connection.execute(
        db.plain(
            "insert into {schema}.workers (id, supervisor_id, hostname, pid, ended_at, ended_how) values ('w9', 's1', 'h', 9, now(), 'left')"
        )
    )
    visitor = new_visitor("admin")
    for path in PAGES:
        page = await visitor.get(path.replace("{task}", str(held.id)))
        assert page.status_code == 200, path
        named = re.search(r"The same in a terminal: <code>([^<]*)</code>", page.text)
        assert named is not None, path
        parse(html.unescape(named[1]))
