"""Test that each migration from version 11 names its oldest code and removes nothing that supported code uses."""

import re

import pytest

from tests.architecture.test_sql_files import NOT_CODE, OLDEST_CODE, SQL

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


@pytest.mark.parametrize("version", FOLDERS)
def test_a_migration_names_the_oldest_code_that_works_with_its_schema(version: int) -> None:  # J3
    assert (FOLDERS[version] / OLDEST_CODE).is_file(), f"{FOLDERS[version].name} has no {OLDEST_CODE}"
    assert max(FIRST, oldest_code(version - 1)) <= oldest_code(version) <= version


@pytest.mark.parametrize("version", FOLDERS)
def test_a_migration_removes_nothing_that_supported_code_uses(version: int) -> None:  # J3
    """Only a migration that raises the oldest code can drop objects, and only those that older code alone used."""
    found = {
        path.name: breaches
        for path in FOLDERS[version].glob("*.sql")
        if (breaches := taken_away(path.read_text()))
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


@pytest.mark.parametrize(
    "name",
    [
        name
        for path in sorted(SQL.rglob("*.sql"))
        if not (name := path.relative_to(SQL).as_posix()).startswith("schema/")
    ],
)
def test_an_insert_statement_lists_its_columns(name: str) -> None:  # J3
    """Otherwise a column that a later migration adds changes the meaning of the insert."""
    code = NOT_CODE.sub(" x ", (SQL / name).read_text(encoding="utf-8"))
    inserts = re.findall(r"\binsert\s+into\s+[\w{}.]+\s*(\(|as\b)?", code)
    assert all(inserts), f"sql/{name}: an insert without a list of columns"
