"""Test commands at a terminal of 80 columns: no word is broken, commands accept the short ids, and pids are shown."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from rich.cells import cell_len

from everbeat import App
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.terminal import pages_at_terminal
from tests.cli.wide_scene import HOST, NAME, PID, QUEUE, WideScene, played, tree
from tests.client.conftest import app
from tests.store.conftest import StoreHarness

__all__ = ["app"]
COLUMNS = 80
_ABOUT_TEN_MINUTES = r"(10 m|9 m \d+ s)"
_CHANGES = re.compile(r"\(?[\d.,:+-]+[a-z%]*[),;.:]?")
"""Numbers, moments and lengths of time: they differ from one look to the next."""
_UNITS = {"ms", "s", "m", "h", "d"}
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}(-[0-9a-f]{1,4}){0,3}(-[0-9a-f]{1,12})?")


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        yield made
        made.database.close()


@pytest.fixture
def scene(app: App, db: StoreHarness) -> WideScene:
    return played(app, db)


def narrow(everbeat: Command, commands: list[list[str]], *, columns: int = COLUMNS) -> list[str]:
    return pages_at_terminal(
        commands, folder=everbeat.folder, environment=everbeat.environment, columns=columns
    )


def broken_words(page: str, whole: str) -> list[str]:
    """Return the words of a page that are not words of the same page in a pipe, where no text is cut or wrapped."""
    known = set(whole.split())
    ids = [word for word in re.split(r"[\s'(),;:]+", whole) if _ID.match(word) or word.startswith(HOST[:8])]

    def is_whole(word: str) -> bool:
        if word in known or word.rstrip(":") in _UNITS or _CHANGES.fullmatch(word):
            return True
        if word.endswith("…"):
            return True  # free text that was cut; names and ids are checked separately
        return any(each == word or (each.startswith(f"{word}") and len(word) >= 13) for each in ids)

    return [word for word in page.split() if not is_whole(word)]


@pytest.mark.long
def test_no_page_at_80_columns_breaks_an_id_a_header_or_a_name(
    scene: WideScene, everbeat: Command
) -> None:  # J10
    pages = narrow(everbeat, scene.pages())
    unbroken = narrow(everbeat, scene.pages(), columns=2_000)
    for words, page, whole in zip(scene.pages(), pages, unbroken, strict=True):
        assert [line for line in page.splitlines() if cell_len(line) > COLUMNS] == [], (words, page)
        assert broken_words(page, whole) == [], (words, page)
        for cut in re.findall(r"\S*…", page):
            assert not any(name.startswith(cut[:-1]) and len(cut) > 8 for name in (NAME, QUEUE, HOST)), (
                words,
                page,
            )


def test_the_pid_of_every_worker_and_supervisor_is_shown_at_80_columns(
    scene: WideScene, everbeat: Command
) -> None:  # J10
    live, everyone, swept = narrow(everbeat, [["workers"], ["workers", "--all"], ["recoveries"]])
    for page in (live, everyone):
        for pid in (PID, PID + 1, PID + 2):
            assert re.search(rf"(?m)^\S+ +{pid} ", page), page
    assert f"-{PID + 1}\n" in swept


@pytest.mark.long
def test_the_history_of_a_worker_shows_its_pid_at_any_width(
    scene: WideScene, everbeat: Command
) -> None:  # J10
    for columns in (40, COLUMNS, 200):
        (page,) = narrow(everbeat, [["workers", "--history", scene.workers[0]]], columns=columns)
        assert re.search(rf"\bPID\b(?s:.*)\b{PID + 1}\b", page), page
    document = everbeat("workers", "--history", scene.workers[0], "--json").document
    assert [each["pid"] for each in document["snapshots"]] == [PID + 1]


def test_a_narrow_table_omits_empty_columns_first(db: StoreHarness, everbeat: Command) -> None:  # J10
    tree(db, "vm-21861-9f8e7d6c", "vm-21862-0a1b2c3d", pid=21_861, queues=None)
    db.connection.execute(
        db.plain(
            "insert into {schema}.worker_states (worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)"
            " values ('vm-21862-0a1b2c3d', 1, 0, 10, 48000000, 12, 3)"
        )
    )
    narrow_page, wide_page = (
        narrow(everbeat, [["workers"]], columns=columns)[0].splitlines()[0].split()
        for columns in (COLUMNS, 200)
    )
    assert "NATS" in wide_page
    assert "NATS" not in narrow_page
    assert "CPU" in narrow_page


def test_wrapped_lines_of_a_check_are_indented_below_its_text(
    scene: WideScene, everbeat: Command
) -> None:  # J10
    (page,) = narrow(everbeat, [["doctor"]])
    first = re.compile(r"(OK   |WARN |FAIL )[A-Z_]{4,12} +\S|\d+ OK, ")
    later = [line for line in page.splitlines() if not first.match(line)]
    assert len(later) >= 3, page
    assert [line for line in later if not re.match(r" {18}(try: | {5})?\S| +\S{50,}", line)] == [], page
    assert str(scene.failed) not in page


def test_wrapped_lines_of_an_error_and_its_fix_are_indented_below_their_text(
    everbeat: Command,
) -> None:  # J10
    refused = [
        ["worker", "shop:app", "--url", "postgresql://somewhere/else"],
        ["tasks", "list", "--since", "the day before yesterday at noon"],
        ["workers", "quiet", "--host", "a", "--all"],
        ["queues", "--app", "shop:app", "--schema", "other"],
    ]
    unbroken = narrow(everbeat, refused, columns=2_000)
    for page, whole in zip(narrow(everbeat, refused, columns=50), unbroken, strict=True):
        said = page[re.search(r"(?m)^error: ", page).start() :].splitlines()  # type: ignore[union-attr]
        assert len(said) > 1, page
        margin = 0
        for line in said:
            label = re.match(r"(error|fix): ", line)
            margin = label.end() if label else margin
            assert label or (line.startswith(" " * margin) and line[margin] != " "), page
            assert cell_len(line) <= 50, page
        assert broken_words(page, whole) == []


def test_a_table_is_complete_on_a_wide_terminal_and_in_a_pipe(scene: WideScene, everbeat: Command) -> None:
    def steady(page: str) -> list[str]:
        words = re.sub(rf"retry in {_ABOUT_TEN_MINUTES}", "retry", page).split()
        return [word for word in words if not _CHANGES.fullmatch(word)]

    (wide,) = narrow(everbeat, [["tasks", "list"]], columns=400)
    assert steady(everbeat("tasks", "list").out) == steady(wide)
    assert str(scene.failed) in wide
    assert QUEUE in wide


@pytest.mark.long
def test_every_short_id_of_a_table_is_accepted_by_the_command_that_shows_it(
    scene: WideScene, everbeat: Command
) -> None:  # J10
    tasks, workflows, workers = narrow(everbeat, [["tasks", "list"], ["workflows"], ["workers"]])
    shown = re.findall(rf"(?m)^({_ID.pattern}) ", tasks)
    assert len(shown) == 9, tasks
    prefixes = [prefix for prefix, *_ in shown]
    for command in (["tasks", "show"], ["explain"]):
        pages = narrow(everbeat, [[*command, prefix] for prefix in prefixes])
        for prefix, page in zip(prefixes, pages, strict=True):
            assert re.search(rf"(?m)^(id|task) +{prefix}", page), page
    ((workflow, *_),) = re.findall(rf"(?m)^({_ID.pattern}) ", workflows)
    one, why = narrow(everbeat, [["workflows", "show", workflow], ["explain", workflow]])
    assert f"  {scene.workflow}\n" in one
    assert f"  {scene.workflow}\n" in why
    parties = re.findall(r"(?m)^(everbeat-\S+) ", workers)
    assert len(parties) == 3
    everbeat("workers", "quiet", *parties).assert_code(0)


def test_the_task_list_shows_when_a_retry_is_due(scene: WideScene, everbeat: Command) -> None:
    out = everbeat("tasks", "list", "--state", "pending", "--error", "CardDeclinedByTheBank").out
    assert re.search(rf"{scene.retrying} .*retry in {_ABOUT_TEN_MINUTES}: UNHANDLED_EXCEPTION", out), out
