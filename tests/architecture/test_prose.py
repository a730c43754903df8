"""Test that all prose of the project keeps the measurable rules of plain English, room by room."""

from pathlib import Path

import pytest

from tests.architecture import prose
from tests.architecture.prose import LONG, Passage, findings
from tests.architecture.source_tree import project_files

BROKEN = [
    ("who", "Who commits a task may have read it."),
    ("who", "The lock is held by who stops the server."),
    ("whoever", "The task is settled by whoever finds it first."),
    ("whoever", "This is somebody's own."),
    ("what", "What was suspended has begun."),
    ("what", "The worker ends, and what has ended receives nothing."),
    ("everything that", "Everything that waits is listed."),
    ("may not", "The worker may not write."),
    ("is no", "A path is no JSON value."),
    ("is no", "The standby servers are no\nreason to stop."),
    ("so long", "Keep heartbeats so long."),
    ("does not tell", "The supervisor tells the worker."),
    ("does not tell", "The worker is told of tasks."),
    ("heed", "The variable is not heeded."),
    ("ask after", "The sweep asks after silent workers."),
    ("hand on", "It hands it on to the worker."),
    ("give up on", "The relay gave up on the message."),
    ("take away", "The sweep takes away its task."),
    ("does not look", "The sweep looks at all tasks."),
    ("of its own", "The worker has a session of its own."),
    ("any more", "It does not run any more."),
    ("is like that", "No task is like that."),
    ("go on", "The worker goes on."),
    ("but for", "All are listed, but for these."),
    ("dear", "Polling is dear."),
    (LONG, "word " * 26 + "end."),
]

SOUND = [
    "Who can retry a workflow?",
    "You must not tell both cases apart by hand.",
    "There is no open transaction. There are no workers.",
    "The task is no longer pending.",
    "The table grows so long that a scan blocks.",
    "`who` and `nobody` are roles, and `may not` is code.",
    "Look at the log first.",
    "A worker claims its own tasks.",
    "No more rows match; any more rows are ignored.",
    "Read [the page](what-is-no.md).",
    "A list of names counts as one word: " + "`a`, " * 26 + "`b` and `c`.",
    "Word " + "word " * 23 + "end. Word " + "word " * 23 + "end.",
]


@pytest.mark.parametrize(("rule", "text"), BROKEN)
def test_the_prose_check_finds_a_sentence_that_breaks_a_rule(rule: str, text: str) -> None:
    assert [each.rule for each in findings(Passage("a.md", 1, text)) if rule in each.rule]


@pytest.mark.parametrize("text", SOUND)
def test_the_prose_check_accepts_a_plain_sentence(text: str) -> None:
    assert [*findings(Passage("a.md", 1, text))] == []


def test_the_prose_check_reads_markdown_by_paragraph_item_and_cell_without_code() -> None:
    text = (
        "# Who\n\nOne\ntwo.\n\n- three\n\n| What | b |\n| --- | --- |\n| four | five |\n\n```\nnobody\n```\n"
    )
    read = [(each.line, each.text, each.kind) for each in prose.markdown("a.md", text)]
    assert read == [
        (1, "Who", "heading"),
        (3, "One\ntwo.", "text"),
        (6, "three", "text"),
        (8, "What", "heading"),
        (8, "b", "heading"),
        (9, "---", "text"),
        (9, "---", "text"),
        (10, "four", "text"),
        (10, "five", "text"),
    ]


def test_the_prose_check_reads_docstrings_comments_messages_and_test_names() -> None:
    text = (
        '"""One."""\n\n\ndef test_a_task_ends():\n    """Two."""\n    # three\n    # four\n'
        '    x = 1  # noqa: E501\n    raise E(f"no {x} was "\n            "found here")\n'
    )
    read = {(each.line, each.text, each.kind) for each in prose.python("a.py", text, messages=True)}
    assert read == {
        (1, "One.", "text"),
        (4, "a task ends", "name"),
        (5, "Two.", "text"),
        (6, "three\nfour", "text"),
        (9, "no X was found here", "text"),
    }
    assert not any("found" in each.text for each in prose.python("a.py", text, messages=False))


def test_the_prose_check_reads_comments_of_sql_and_makefiles_in_blocks() -> None:
    text = "-- one\n-- two\nselect 1 -- three\n"
    read = [(each.line, each.text) for each in prose.commented("a.sql", text, "--")]
    assert sorted(read) == [(1, "one\ntwo"), (3, "three")]


def test_a_prose_finding_names_file_line_text_and_rule() -> None:
    [finding] = findings(Passage("a.md", 7, "One\ntwo. The worker\nmay not write."))
    assert str(finding).startswith("a.md:9: ")
    assert "may not write" in str(finding)


def test_the_prose_budget_names_rooms_above_it_and_only_falls() -> None:
    budget = {"docs": {"findings": 2, "long": 1}, "src/everbeat/nats": {"findings": 1, "long": 0}}
    now = {"docs": {"findings": 3, "long": 0}, "src/everbeat/cli": {"findings": 1, "long": 0}}
    assert prose.above(now, budget) == [
        "docs: 3 findings, at most 2",
        "src/everbeat/cli: 1 findings, at most 0",
    ]
    assert prose.lowered(now, budget) == {"docs": {"findings": 2, "long": 0}}


def test_no_room_exceeds_its_budget_of_prose_findings() -> None:
    found = prose.found_in(project_files())
    over = prose.above(prose.counts(found), prose.recorded())
    hint = (
        "List them with `python -m tests.architecture.prose --long PATH`. "
        "If a file moved to this room, move its numbers in prose_budget.toml, too."
    )
    assert not over, "\n".join([*over, hint])


def test_files_that_are_exempt_from_the_prose_check_exist() -> None:
    assert [name for name in prose.QUOTING if not Path(prose.ROOT, name).is_file()] == []
