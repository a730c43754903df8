"""Test that every .sql file begins with its purpose and has one statement, and that migrations are numbered."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache

import pytest

from everbeat.store.migrations import MigrationStep
from tests.architecture.source_tree import PACKAGE

SQL = PACKAGE / "sql"
MIGRATION = re.compile(r"(?P<version>\d{4})_[a-z0-9_]+")
MIGRATION_STEP = re.compile(r"(?P<number>\d{2})_[a-z0-9_]+\.sql")
OLDEST_CODE = "oldest_code.txt"
NOT_CODE = re.compile(
    r"""--[^\n]*                        # comments
      | /\*.*?\*/
      | \b[eE]'(?:[^'\\]|\\.|'')*'      # strings and quoted names
      | '(?:[^']|'')*'
      | "(?:[^"]|"")*"
      | (\$\w*\$).*?\1                  # bodies of functions
    """,
    re.VERBOSE | re.DOTALL,
)


def statements(text: str) -> int:
    return sum(1 for part in NOT_CODE.sub(" x ", text).split(";") if part.replace("x", "").strip())


def names() -> list[str]:
    return sorted(path.relative_to(SQL).as_posix() for path in SQL.rglob("*.sql"))


@cache
def texts() -> Mapping[str, str]:
    """Return the text of each .sql file. A test for each file would be one of thousands that each test process collects."""
    return {name: (SQL / name).read_text(encoding="utf-8") for name in names()}


def test_every_sql_file_begins_with_a_comment() -> None:
    first_lines = {name: text.split("\n", 1)[0] for name, text in texts().items()}
    assert {name: line for name, line in first_lines.items() if not re.match(r"-- \w", line)} == {}


def test_every_sql_file_has_one_statement() -> None:
    numbers_found = {name: statements(text) for name, text in texts().items()}
    assert {name: number for name, number in numbers_found.items() if number != 1} == {}


def test_a_plain_string_in_sql_contains_no_backslash() -> None:  # J1
    r"""A database with standard_conforming_strings = off reads it in another way: write E'\\\\' for one."""
    assert {name: found for name, text in texts().items() if (found := backslashes(text))} == {}


def backslashes(text: str) -> list[str]:
    """Return the plain strings with a backslash, also those in the bodies of functions."""
    return [
        each[0]
        for found in NOT_CODE.finditer(text)
        for each in (NOT_CODE.finditer(found[0].strip("$")) if found[0].startswith("$") else [found])
        if each[0].startswith("'") and "\\" in each[0]
    ]


def test_a_backslash_in_a_plain_string_is_found_in_statements_and_functions() -> None:
    assert backslashes(r"select '\a', E'\b', 'c'") == [r"'\a'"]
    assert backslashes(r"create function f() as $$ select '\a' || E'\b' $$") == [r"'\a'"]


def test_every_sql_fragment_is_part_of_at_least_two_statements() -> None:
    """A fragment that one statement uses hides a part of it from the reader."""
    uses = Counter(
        found
        for path in SQL.rglob("*.sql")
        for found in set(re.findall(r"\{(fragment/\w+)\}", path.read_text(encoding="utf-8")))
    )
    fragments = {name.removesuffix(".sql") for name in names() if name.startswith("fragment/")}
    assert fragments == {fragment for fragment, statements in uses.items() if statements >= 2}


def test_migrations_are_numbered_without_gaps_and_no_two_steps_have_one_number() -> None:
    folders = sorted(path.name for path in (SQL / "schema").iterdir() if path.is_dir())
    assert numbers(MIGRATION, folders) == list(range(1, len(folders) + 1))
    for folder in folders:
        steps = sorted(path.name for path in (SQL / "schema" / folder).iterdir() if path.name != OLDEST_CODE)
        numbered = numbers(MIGRATION_STEP, steps)
        assert 0 not in numbered, f"{folder}: a name that breaks the pattern"
        assert len(set(numbered)) == len(numbered), f"{folder}: two steps with one number have no order"


def test_an_index_of_a_table_that_is_in_use_is_built_and_dropped_concurrently() -> None:  # J3
    in_use = {name: text for name, text in texts().items() if re.match(r"schema/00(?!0\d|10)\d\d_", name)}
    assert in_use
    for name, text in in_use.items():
        plain = NOT_CODE.sub(" x ", text.replace("{schema}", "s").replace("{concurrently}", "concurrently"))
        says_index = re.search(r"\b(create\s+(unique\s+)?|drop\s+)index\b", plain, re.IGNORECASE) is not None
        step = MigrationStep(0, name.removesuffix(".sql"))
        assert step.is_concurrent is says_index, name
        if says_index:
            assert re.search(rf"\b{step.index}\b", plain), name


def numbers(pattern: re.Pattern[str], found: list[str]) -> list[int]:
    """Return the number at the start of each name, and 0 for a name that does not match the pattern."""
    return [int(match[1]) if (match := pattern.fullmatch(name)) else 0 for name in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-- nothing; at all\n", 0),
        ("-- one;\nSELECT 1", 1),
        ("SELECT 1;\n-- done;\n", 1),
        ("SELECT ';', E'\\';', \";\"; /* ; */", 1),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS $body$ SELECT 1; SELECT 2; $body$;", 1),
        ("SELECT 1; SELECT 2", 2),
    ],
)
def test_sql_statements_are_counted_outside_strings_and_comments(text: str, expected: int) -> None:
    assert statements(text) == expected
