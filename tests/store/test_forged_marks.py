"""Forged marks: a row whose mark no worker wrote affects no other task, neither in the listing of workers nor in `doctor`."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from everbeat.domain.task.needs import Needs
from everbeat.store import diagnosis
from everbeat.store.tasks import BEGINNING, marked
from tests.store.conftest import StoreHarness
from tests.store.test_marked_tasks import declined, groups, mark

HONEST = '{"arguments" : ["a", "b"]}'
FORGED = {
    "other names": """needs = '{"arguments": []}'""",
    "a requirement of a later version": """needs = '{"arguments": ["a", "b"], "hardware": 1}'""",
    "no object": """needs = '[]'""",
    "a megabyte": """needs = ('{"arguments": ["' || repeat('x', 1000000) || '"]}')::json""",
    "another task": "name = 'other'",
}


def forge(db: StoreHarness, setting: str, needs_id: UUID, **options: object) -> UUID:
    """Insert a forged task into the group of `needs_id`, ahead of the other tasks of the group."""
    task = db.send(**options)
    db.connection.execute(
        db.plain(
            "update {schema}.tasks set needs = %s, needs_id = %s, enqueued_at = enqueued_at - interval '1 hour' where id = %s"
        ),
        [HONEST, needs_id, task],
    )
    query = f"update {db.target.schema}.tasks set {setting} where id = %s"
    db.connection.execute(query, [task])  # type: ignore[arg-type]
    return task


@pytest.mark.parametrize("setting", FORGED.values(), ids=list(FORGED))
@pytest.mark.parametrize("line", [None, "key:a"])
def test_workers_and_the_doctor_read_the_needs_of_a_group_from_a_genuine_row(  # J2
    db: StoreHarness, setting: str, line: str | None
) -> None:
    honest = mark(db, serial=line)
    group = db.row(honest, "needs_id")
    forged = forge(db, setting, group, serial=None if line is None else "key:b")
    touch = db.plain(
        "update {schema}.tasks set enqueued_at = enqueued_at - interval '1 second' where id = %s"
    )
    db.connection.execute(touch, [honest])  # an index of equal keys now has the forged row first
    (found,) = groups(db)
    assert (found.needs_id, found.name, found.needs) == (group, "work", HONEST)
    (told,) = db.run(diagnosis.marked())
    assert (told.name, told.needs, told.waiting) == ("work", Needs(("a", "b")), 2)
    taken = db.claim(marked=[found], names=["work", "other"])
    assert {each.id for each in taken} == {honest, forged}
    verdicts = declined(db, *sorted(taken, key=lambda each: each.id != forged))
    assert verdicts[0] == "PENDING", "the forged row gets a mark of its own"
    assert db.row(forged, "needs_id") != group


def test_the_listing_of_groups_skips_a_group_that_has_only_forged_rows(db: StoreHarness) -> None:  # J2
    for number in range(3):
        forge(db, "priority = 0", UUID(int=number + 1))
        forge(db, "priority = 0", UUID(int=number + 1), serial=f"key:{number}")
    honest = mark(db)
    in_line = mark(db, args=b'{"c": 1}', serial="key:a")
    assert {each.needs_id for each in groups(db, most=1)} == {
        db.row(honest, "needs_id"),
        db.row(in_line, "needs_id"),
    }
    page = db.run(marked(BEGINNING, most=2))
    assert page.after is not None


def test_the_listing_of_groups_finds_a_group_behind_two_thousand_others(db: StoreHarness) -> None:  # J2
    """A sender can invent any number of argument names."""
    db.connection.execute(
        db.plain(
            """insert into {schema}.tasks (id, name, queue, args, needs, needs_id)
               select gen_random_uuid(), 'work', 'default', '{{}}', mark.needs, {schema}.mark_of('work', mark.needs)
               from generate_series(1, 2000) n
               cross join lateral (select json_build_object('arguments', json_build_array('x' || n)) as needs) mark"""
        )
    )
    honest = mark(db)
    found = groups(db, most=200)
    assert len(found) == 2_001
    assert [each.needs_id for each in found].count(db.row(honest, "needs_id")) == 1


def test_the_mark_of_a_task_is_a_hash_of_its_name_and_its_needs(db: StoreHarness) -> None:  # J2
    task = mark(db)
    assert db.row(task, f"needs_id = {db.target.schema}.mark_of(name, needs)") is True
    assert db.row(task, f"needs_id = {db.target.schema}.mark_of('other', needs)") is False
    assert uuid4() != db.row(task, "needs_id")
