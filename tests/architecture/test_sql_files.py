"""Test that every .sql file begins with its purpose and has one statement, and that migrations are numbered."""

import re
from collections import Counter

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


@pytest.mark.parametrize("name", names())
def test_every_sql_file_begins_with_a_comment(name: str) -> None:
    first = (SQL / name).read_text(encoding="utf-8").split("\n", 1)[0]
    assert re.match(r"-- \w", first), f"sql/{name} must open with a comment, not with {first!r}"


@pytest.mark.parametrize("name", names())
def test_every_sql_file_has_one_statement(name: str) -> None:
    assert statements((SQL / name).read_text(encoding="utf-8")) == 1


@pytest.mark.parametrize("name", names())
def test_a_plain_string_in_sql_contains_no_backslash(name: str) -> None:  # J1
    r"""A database with standard_conforming_strings = off reads it in another way: write E'\\\\' for one."""
    for found in NOT_CODE.finditer((SQL / name).read_text(encoding="utf-8")):
        parts = NOT_CODE.finditer(found[0].strip("$")) if found[0].startswith("$") else [found]
        assert not [each[0] for each in parts if each[0].startswith("'") and "\\" in each[0]]


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


@pytest.mark.parametrize("name", [name for name in names() if re.match(r"schema/00(?!0\d|10)\d\d_", name)])
def test_an_index_of_a_table_that_is_in_use_is_built_and_dropped_concurrently(name: str) -> None:  # J3
    text = (SQL / name).read_text(encoding="utf-8")
    plain = NOT_CODE.sub(" x ", text.replace("{schema}", "s").replace("{concurrently}", "concurrently"))
    says_index = re.search(r"\b(create\s+(unique\s+)?|drop\s+)index\b", plain, re.IGNORECASE) is not None
    step = MigrationStep(0, name.removesuffix(".sql"))
    assert step.is_concurrent is says_index
    if says_index:
        assert re.search(rf"\b{step.index}\b", plain)


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
