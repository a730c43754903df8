"""Test that each migration from version 11 names its oldest code and removes nothing that supported code uses."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.architecture.test_sql_files import NOT_CODE, OLDEST_CODE, SQL, texts

FIRST = 11
"""Migrations before it are closed; their code works with its own version alone."""
NAME = r"(?:x|\w+)"
TAKES_AWAY = {
    "drops what code may use": re.compile(r"\bdrop (?:table|view|materialized|function|index|schema|type|sequence)\b"),
    "drops a column": re.compile(
        rf"\balter table\b.*\bdrop (?!constraint\b|not null\b|default\b|expression\b|identity\b){NAME}"
    ),
    "renames": re.compile(r"\brename\b"),
    "changes a type": re.compile(rf"\balter (?:column )?{NAME} (?:set data )?type\b"),
    "demands a value": re.compile(r"\bset not null\b"),
    "adds a column that demands a value": re.compile(
        r"\badd (?:column )?(?!constraint\b)(?:(?!,|\bdefault\b|\bgenerated\b).)*\bnot null\b(?!(?:(?!,).)*\b(?:default|generated)\b)"
    ),
}  # fmt: skip
FOLDERS = {
    int(folder.name[:4]): folder
    for folder in sorted((SQL / "schema").iterdir())
    if folder.is_dir() and int(folder.name[:4]) >= FIRST
}


def taken_away(statement: str) -> list[str]:
    """Return the changes of a statement that could break a program of the version before."""
    code = " ".join(NOT_CODE.sub(" x ", statement.replace("{schema}.", "")).lower().split())
    return [rule for rule, breach in TAKES_AWAY.items() if breach.search(code)]


def oldest_code(version: int) -> int:
    if version < FIRST:
        return version
    return int((FOLDERS[version] / OLDEST_CODE).read_text(encoding="utf-8"))


class Index(NamedTuple):
    """The definition of one index; `more` is what follows its columns."""

    name: str
    unique: str
    table: str
    columns: str
    more: str

    def widens(self, before: Index) -> bool:
        """Return whether each plan with the index `before` can use this index instead.

        A unique index is never replaced, because `on conflict` names its exact columns.
        """
        is_alike = (self.table, self.more) == (before.table, before.more) and not self.unique + before.unique
        return is_alike and self.columns.startswith(f"{before.columns},")


def index_of(text: str) -> Index | None:
    """Return the index that a migration statement creates."""
    code = " ".join(
        re.sub(r"--[^\n]*", "", text).replace("{schema}.", "").replace("{concurrently}", "").split()
    )
    found = re.fullmatch(
        r"create (unique )?index (?:if not exists )?(\w+) on (\w+) \(((?:[^()]|\([^()]*\))*)\)(.*)", code
    )
    return Index(found[2], found[1] or "", found[3], found[4], found[5].strip()) if found else None


def widened_indexes(version: int) -> set[str]:
    """Return the steps of a folder that rename and drop an index, and create a wider one in its place under its name."""
    older = {
        index.name: index
        for folder in sorted((SQL / "schema").iterdir())
        if folder.is_dir() and int(folder.name[:4]) < version
        for path in sorted(folder.glob("*.sql"))
        if (index := index_of(path.read_text(encoding="utf-8")))
    }
    steps = {path.name[3:]: path for path in sorted(FOLDERS[version].glob("*.sql"))}
    found: set[str] = set()
    for name, before in older.items():
        order = [steps.get(f"{step}.sql") for step in (f"{name}_before", name, f"drop_{name}_before")]
        if None in order:
            continue
        rename, create, drop = (path for path in order if path is not None)
        index = index_of(create.read_text(encoding="utf-8"))
        if index is not None and index.widens(before) and rename.name < create.name < drop.name:
            found |= {rename.name, drop.name}
    return found


@pytest.mark.parametrize(
    ("index", "is_wider"),
    [
        ("create index i on {schema}.t (a, b) where c > 1", True),
        ("create index i on {schema}.t (a) where c > 1", False),
        ("create index i on {schema}.t (b, a) where c > 1", False),
        ("create index i on {schema}.t (a, b)", False),
        ("create index i on {schema}.u (a, b) where c > 1", False),
        ("create index i on {schema}.t (ab, b) where c > 1", False),
        ("create unique index i on {schema}.t (a, b) where c > 1", False),
    ],
)
def test_an_index_that_serves_the_plans_of_another_one_is_recognised(index: str, is_wider: bool) -> None:
    before, after = index_of("-- I.\ncreate index i on {schema}.t (a) where c > 1"), index_of(index)
    assert before is not None
    assert after is not None
    assert after.widens(before) is is_wider


@pytest.mark.parametrize("version", FOLDERS)
def test_a_migration_names_the_oldest_code_that_works_with_its_schema(version: int) -> None:  # J3
    assert (FOLDERS[version] / OLDEST_CODE).is_file(), f"{FOLDERS[version].name} has no {OLDEST_CODE}"
    assert max(FIRST, oldest_code(version - 1)) <= oldest_code(version) <= version


@pytest.mark.parametrize("version", FOLDERS)
def test_a_migration_removes_nothing_that_supported_code_uses(version: int) -> None:  # J3
    """Only a migration that raises the oldest code can drop objects, and only those that older code alone used.

    An index can give way to a wider one under its name.
    """
    widened = widened_indexes(version)
    found = {
        path.name: breaches
        for path in FOLDERS[version].glob("*.sql")
        if path.name not in widened and (breaches := taken_away(path.read_text()))
    }
    assert not found or oldest_code(version) > oldest_code(version - 1), (
        f"{FOLDERS[version].name} supports the same code as the migration before, but {found}. Drop it a version later, or raise its"
        f" {OLDEST_CODE}."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "breaches"),
    [
        ("-- Gone.\ndrop index {schema}.tasks_pending", ["drops what code may use"]),
        ("drop table if exists {schema}.beats", ["drops what code may use"]),
        ("drop function {schema}.bad_rows(integer)", ["drops what code may use"]),
        ("alter table {schema}.tasks drop column flags", ["drops a column"]),
        ("alter table {schema}.tasks add column more integer, drop flags", ["drops a column"]),
        ("alter table {schema}.tasks rename column flags to marks", ["renames"]),
        ("alter index {schema}.tasks_pending rename to tasks_due", ["renames"]),
        ("alter table {schema}.tasks alter column priority type integer", ["changes a type"]),
        ("alter table {schema}.tasks alter priority set data type integer", ["changes a type"]),
        ("alter table {schema}.tasks alter column key set not null", ["demands a value"]),
        ("alter table {schema}.tasks add column edition integer not null", ["adds a column that demands a value"]),
        (
            "alter table {schema}.tasks add column a integer not null default 1, add column b text not null",
            ["adds a column that demands a value"],
        ),
        ("alter table {schema}.tasks add column edition integer not null default 11", []),
        ("alter table {schema}.tasks add column edition integer default 11 not null", []),
        ("alter table {schema}.tasks add column a integer, add column b text default 'not null'", []),
        ("alter table {schema}.tasks drop constraint tasks_state, add constraint c check (a is not null) not valid", []),
        ("create index later on {schema}.tasks (id) where needs_id is not null", []),
        ("-- It must not drop table tasks.\ncreate table {schema}.more (id uuid not null)", []),
        ("create or replace function {schema}.f() returns trigger language plpgsql as $$ begin drop table a; end $$", []),
    ],
)  # fmt: skip
def test_a_migration_statement_that_breaks_older_code_is_recognised(
    statement: str, breaches: list[str]
) -> None:  # J3
    assert taken_away(statement) == breaches


def test_an_insert_statement_lists_its_columns() -> None:  # J3
    """Otherwise a column that a later migration adds changes the meaning of the insert."""
    own = {name: text for name, text in texts().items() if not name.startswith("schema/")}
    assert own
    assert [name for name, text in own.items() if not lists_columns(text)] == []


def lists_columns(text: str) -> bool:
    """Return whether each insert of the file lists its columns."""
    return all(re.findall(r"\binsert\s+into\s+[\w{}.]+\s*(\(|as\b)?", NOT_CODE.sub(" x ", text)))


@pytest.mark.parametrize(
    ("text", "is_listed"),
    [
        ("insert into {schema}.t (a) values (1)", True),
        ("insert into {schema}.t as old (a) values (1)", True),
        ("insert into {schema}.t values (1)", False),
        ("insert into {schema}.t (a) values (1); insert into {schema}.u select 1", False),
    ],
)
def test_an_insert_without_a_list_of_columns_is_recognised(text: str, is_listed: bool) -> None:
    assert lists_columns(text) is is_listed
