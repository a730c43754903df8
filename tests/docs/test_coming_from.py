"""The page for people who come from other systems names nothing of everbeat that does not exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import psycopg
import pytest

import everbeat
from everbeat import RecoveryConfig, errors, inspection, recovery, workflows
from everbeat.cli.main import COMMANDS, load_command
from everbeat.client.options import SendOptions
from everbeat.domain.task.policy import TaskOptions
from everbeat.errors import ConfigurationError, EverbeatError
from everbeat.nats import messenger, relay
from everbeat.runtime.events import Event, event_name
from everbeat.store import migrating
from everbeat.store.target import Target
from everbeat.workflows import WorkflowState
from tests.docs.tables import text_of
from tests.docs.test_reference import SOURCE, options_of
from tests.surface.source import subclasses

PAGE = "coming-from.md"
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?P<owner>[@\w.]+)\((?P<name>\w+)=.*\)")
WORDS = {"timedelta", "false"}
"""Code that is nobody's name."""


def rows() -> Iterator[list[str]]:
    """The cells of every row of the page's tables: theirs, ours, what differs."""
    for line in text_of(PAGE).splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip()[1:-1].split(" | ")]


def ours() -> list[str]:
    """Everything in code type that the page says of everbeat: all but the first cell of a row, and the example."""
    prose = re.sub(r"```.*?```", "", text_of(PAGE), flags=re.DOTALL)
    said = [line for line in prose.splitlines() if not line.startswith("|")]
    said += [cell for row in rows() for cell in row[1:]]
    return sorted({token for text in said for token in CODE.findall(text)})


@pytest.fixture(scope="module")
def columns(database_url: str) -> set[str]:
    """The tables and views of a fresh schema, and their columns as `table.column`."""
    target = Target.parse(database_url, schema="coming_from")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("drop schema if exists coming_from cascade")
        with target.connect("everbeat docs") as own:
            migrating.migrate(own, target)
        found = connection.execute(
            "select table_name, column_name from information_schema.columns where table_schema = 'coming_from'"
        ).fetchall()
        connection.execute("drop schema coming_from cascade")
    return {f"{table}.{column}" for table, column in found} | {table for table, _ in found}


def codes() -> set[str]:
    """Codes and states, as far as they are written in the statements, and those of errors."""
    statements = "".join(path.read_text(encoding="utf-8") for path in (SOURCE / "sql").rglob("*.sql"))
    begun = re.findall(r"'([A-Z]+_)' \|\|", statements)
    return {
        *re.findall(r"'([A-Z][A-Z_]+)'", statements),
        *(f"{prefix}{state}" for prefix in begun for state in WorkflowState),
        *(each.code for each in subclasses(EverbeatError)),
    }


def events() -> set[str]:
    """The names of all events, each from an object that has the name of its class and nothing else."""
    assert {messenger.TaskSkippedActiveElsewhere, relay.TaskReenqueued} <= set(subclasses(Event))
    return {event_name(type(kind.__name__, (), {})()) for kind in subclasses(Event)}


def is_literal(token: str) -> bool:
    try:
        ast.literal_eval(token)
    except (ValueError, SyntaxError):
        return False
    return True


def is_command(words: list[str]) -> bool:
    """Whether `everbeat` has this command, with these options."""
    name, *rest = words
    if name not in COMMANDS:
        return False
    command = load_command(name)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    options = [word for word in rest if word.startswith("--")]
    return set(options) <= set(options_of(command)) and (not rest or rest[0].startswith("--"))


def takes(owner: str, name: str) -> bool:
    """Whether a parameter of this name can be given there."""
    match owner:
        case "@app.task":
            return name in {each.name for each in fields(TaskOptions)}
        case "with_options":
            return name in SendOptions.__annotations__
        case _:
            return name in inspect.signature(attribute(owner)).parameters


def attribute(dotted: str) -> Any:
    """An attribute of everbeat; raises AttributeError."""
    first, *others = dotted.removesuffix("()").split(".")
    places = (everbeat, errors, inspection, recovery, workflows)
    found: Any = getattr(next((place for place in places if hasattr(place, first)), everbeat), first)
    for name in others:
        found = getattr(found, name)
    return found


def exists(token: str, *, columns: set[str]) -> bool:
    if token in WORDS or is_literal(token) or token in columns | codes() | events():
        return True
    if token.startswith("everbeat "):
        return is_command(token.split()[1:])
    if call := CALL.fullmatch(token):
        return takes(call["owner"], call["name"])
    try:
        attribute(token)
    except (AttributeError, KeyError):
        return False
    return True


def test_every_everbeat_name_on_the_page_for_newcomers_exists(columns: set[str]) -> None:
    named = ours()
    assert len(named) > 150, "the page must be parsed"
    assert [token for token in named if not exists(token, columns=columns)] == []


@pytest.mark.parametrize(
    "token",
    [
        "App.sweep_workers",
        "RecoveryConfig.sweep_threshold",
        "everbeat sweep --all-of-them",
        "everbeat workers unlock",
        "@app.task(queue_name=...)",
        "with_options(flags=...)",
        "App(brokers=...)",
        "job_reenqueued",
        "tasks.last_activity_at",
        "UNHANDLED_ERROR",
    ],
)
def test_an_everbeat_name_that_does_not_exist_is_found(token: str, columns: set[str]) -> None:
    assert not exists(token, columns=columns)


def test_the_defaults_on_the_page_for_newcomers_are_those_of_the_settings() -> None:
    given = 0
    for row in rows():
        names = [
            name.partition(".")[2] for name in CODE.findall(row[1]) if name.startswith("RecoveryConfig.")
        ]
        known = {getattr(RecoveryConfig(), name) for name in names}
        numbers = [
            ast.literal_eval(token) for token in CODE.findall(row[2]) if re.fullmatch(r"[\d_]+", token)
        ]
        given += len(numbers)
        assert set(numbers) <= known, row
    assert given >= 8


@pytest.mark.parametrize(
    "name",
    [
        name
        for row in rows()
        if "RecoveryConfig." in row[1]
        for name in CODE.findall(row[0])
        if re.fullmatch(r"[a-z_0-9]+", name)
    ],
)
def test_a_setting_of_another_task_queue_is_accepted_or_refused_with_ours(name: str) -> None:
    if name in {each.name for each in fields(RecoveryConfig)}:
        return
    with pytest.raises(ConfigurationError) as refusal:
        RecoveryConfig(**{name: 1})
    (problem,) = refusal.value.problems
    assert problem.rule == "other systems have a setting of this name"
    assert problem.fix
