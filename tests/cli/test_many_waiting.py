"""`everbeat queues` shows a lower bound where counting stopped."""

from __future__ import annotations

from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]


def test_more_than_10_000_waiting_tasks_are_shown_as_at_least_10_000(
    everbeat: Command, db: StoreHarness
) -> None:  # R4
    db.connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args) select gen_random_uuid(), 'work', 'mail', '{{}}' from generate_series(1, 10001) n"
        )
    )
    for _ in range(3):
        db.send(queue="films")
    found = everbeat("queues", "--json").assert_code(0).document["queues"]
    assert [(each["name"], each["pending"], each["at_least"]) for each in found] == [
        ("films", 3, []),
        ("mail", 10_000, ["pending"]),
    ]
    lines = everbeat("queues").assert_code(0).out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["3", "10,000+"]
