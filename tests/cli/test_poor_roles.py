"""Test that the error of a role that cannot create schemas names the role and the missing privilege."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo

from tests.cli.conftest import Command


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """Yield a role that can only log in."""
    name = f"poor_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"create role {name} login")  # type: ignore[call-overload]
        yield name
        connection.execute(f"drop owned by {name} cascade")  # type: ignore[call-overload]
        connection.execute(f"drop role {name}")  # type: ignore[call-overload]


@pytest.fixture
def poor_url(database_url: str, role: str) -> str:
    return conninfo.make_conninfo(database_url, user=role)


def database_of(url: str) -> str:
    with psycopg.connect(url) as connection:
        return connection.info.dbname


@pytest.mark.parametrize("words", [("bench", "--only", "send", "--not-durable"), ("demo", "--headless")])
def test_a_command_that_cannot_create_the_schema_names_the_missing_privilege(
    everbeat: Command, database_url: str, role: str, poor_url: str, words: tuple[str, ...]
) -> None:
    grant = f'GRANT CREATE ON DATABASE "{database_of(poor_url)}" TO "{role}"'
    error = everbeat(*words, "--json", "--url", poor_url).assert_code(3).error
    assert error["code"] == "SCHEMA_FORBIDDEN"
    assert grant in error["fix"]
    assert "authorization" not in error["fix"]
    if words[0] == "bench":
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(grant)  # type: ignore[call-overload]
        everbeat(*words, "--tasks", "100", "--pairs", "1", "--allow-busy", "--url", poor_url).assert_code(0)
