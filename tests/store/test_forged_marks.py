"""Marks that no worker wrote: a row whose mark is forged harms no other task, neither in the listing of workers nor in `doctor`."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from everbeat.domain.needs import Needs
from everbeat.store import diagnosis
from everbeat.store.declining import BEGINNING, marked
from tests.store.conftest import Hands
from tests.store.test_marked_tasks import declined, groups, mark

HONEST = '{"arguments" : ["a", "b"]}'
FORGED = {
    "other names": """needs = '{"arguments": []}'""",
    "a requirement of a later version": """needs = '{"arguments": ["a", "b"], "hardware": 1}'""",
    "no object": """needs = '[]'""",
    "a megabyte": """needs = ('{"arguments": ["' || repeat('x', 1000000) || '"]}')::json""",
    "another task": "name = 'other'",
}


def forge(hands: Hands, setting: str, needs_id: UUID, **options: object) -> UUID:
    """A marked task in the group of `needs_id`, before all others of it."""
    task = hands.send(**options)
    hands.connection.execute(
        hands.plain(
            "update {schema}.tasks set needs = %s, needs_id = %s, enqueued_at = enqueued_at - interval '1 hour' where id = %s"
        ),
        [HONEST, needs_id, task],
    )
    query = f"update {hands.target.schema}.tasks set {setting} where id = %s"
    hands.connection.execute(query, [task])  # type: ignore[arg-type]
    return task


@pytest.mark.parametrize("setting", FORGED.values(), ids=list(FORGED))
@pytest.mark.parametrize("line", [None, "key:a"])
def test_workers_and_doctor_read_what_a_group_needs_from_a_row_whose_mark_is_its_own(  # J2
    hands: Hands, setting: str, line: str | None
) -> None:
    honest = mark(hands, serial=line)
    group = hands.row(honest, "needs_id")
    forged = forge(hands, setting, group, serial=None if line is None else "key:b")
    touch = hands.plain(
        "update {schema}.tasks set enqueued_at = enqueued_at - interval '1 second' where id = %s"
    )
    hands.connection.execute(touch, [honest])  # an index of equal keys now has the forged row first
    (found,) = groups(hands)
    assert (found.needs_id, found.name, found.needs) == (group, "work", HONEST)
    (told,) = hands.run(diagnosis.marked())
    assert (told.name, told.needs, told.waiting) == ("work", Needs(("a", "b")), 2)
    taken = hands.claim(marked=[found], names=["work", "other"])
    assert {each.id for each in taken} == {honest, forged}
    verdicts = declined(hands, *sorted(taken, key=lambda each: each.id != forged))
    assert verdicts[0] == "PENDING", "the forged row gets a mark of its own"
    assert hands.row(forged, "needs_id") != group


def test_a_group_of_forged_rows_alone_is_passed_over_and_the_walk_goes_on(hands: Hands) -> None:  # J2
    for number in range(3):
        forge(hands, "priority = 0", UUID(int=number + 1))
        forge(hands, "priority = 0", UUID(int=number + 1), serial=f"key:{number}")
    honest = mark(hands)
    in_line = mark(hands, args=b'{"c": 1}', serial="key:a")
    assert {each.needs_id for each in groups(hands, most=1)} == {
        hands.row(honest, "needs_id"),
        hands.row(in_line, "needs_id"),
    }
    page = hands.run(marked(BEGINNING, most=2))
    assert page.after is not None


def test_many_groups_hide_no_other_from_workers(hands: Hands) -> None:  # J2
    """A sender can invent argument names without end."""
    hands.connection.execute(
        hands.plain(
            """insert into {schema}.tasks (id, name, queue, args, needs, needs_id)
               select gen_random_uuid(), 'work', 'default', '{{}}', mark.needs, {schema}.mark_of('work', mark.needs)
               from generate_series(1, 2000) n
               cross join lateral (select json_build_object('arguments', json_build_array('x' || n)) as needs) mark"""
        )
    )
    honest = mark(hands)
    found = groups(hands, most=200)
    assert len(found) == 2_001
    assert [each.needs_id for each in found].count(hands.row(honest, "needs_id")) == 1


def test_the_mark_of_a_task_is_a_hash_of_its_name_and_its_needs(hands: Hands) -> None:  # J2
    task = mark(hands)
    assert hands.row(task, f"needs_id = {hands.target.schema}.mark_of(name, needs)") is True
    assert hands.row(task, f"needs_id = {hands.target.schema}.mark_of('other', needs)") is False
    assert uuid4() != hands.row(task, "needs_id")
