"""A database for a program that is not everbeat: there while it is used, gone afterwards whoever still holds on to it."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from everbeat.errors import DatabaseError
from everbeat.store.own_database import own_database
from everbeat.store.target import Target


def exists(url: str, name: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute("select from pg_database where datname = %s", [name]).fetchone() is not None


def test_it_is_empty_and_goes_although_somebody_is_connected(database_url: str) -> None:
    name = f"own database {uuid4().hex[:8]}"
    with own_database(Target(url=database_url), name) as url:
        connection = psycopg.connect(url)
        found = connection.execute(
            "select current_database(), count(*) from pg_tables where schemaname = 'public'"
        )
        assert found.fetchone() == (name, 0)
    assert not exists(database_url, name)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("select 1")
    connection.close()


def test_it_goes_also_after_a_failure(database_url: str) -> None:
    name = f"own_{uuid4().hex[:8]}"
    with pytest.raises(ZeroDivisionError), own_database(Target(url=database_url), name):
        raise ZeroDivisionError
    assert not exists(database_url, name)


def test_a_database_that_is_there_is_refused_and_kept(database_url: str) -> None:
    name = f"own_{uuid4().hex[:8]}"
    target = Target(url=database_url)
    with own_database(target, name):
        with pytest.raises(DatabaseError, match=name), own_database(target, name):
            pytest.fail("it took what is another's")
        assert exists(database_url, name)
