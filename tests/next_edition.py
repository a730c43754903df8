"""A next version of everbeat as its authors would write it, with tasks of a new kind that older code must not run.

A task called "newer" is of edition N + 1. A key in `needs` hides it from older code. A trigger rejects and counts leases by
statements that do not declare this edition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from everbeat.store.migrations import known_migrations
from tests.synthetic_version import next_version

CODE: Final = max(each.version for each in known_migrations())
NEXT: Final = CODE + 1

STATEMENTS: Final[Mapping[str, str]] = {
    "10_tasks_columns": f"""-- The edition of a task, and the newest edition that its lease knows.
alter table {{schema}}.tasks add column edition integer not null default {CODE}, add column leased_by integer
""",
    "11_refusals": """-- The leases that were refused.
create table {schema}.refusals (task_id uuid not null, at timestamptz not null default clock_timestamp())
""",
    "12_refuse_lease": f"""-- Refuses a lease that does not know the edition of its task; an end of a lease takes its knowledge with it.
create function {{schema}}.refuse_lease() returns trigger language plpgsql as $$
begin
    if new.state = 'PENDING' then
        new.leased_by := null;
    elsif old.state = 'PENDING' and new.state in ('CLAIMED', 'RUNNING') and new.edition > coalesce(new.leased_by, {CODE}) then
        insert into {{schema}}.refusals (task_id) values (new.id);
        return null;
    end if;
    return new;
end $$
""",
    "13_tasks_edition": """-- For changes of the state: to PENDING and away from it.
create trigger tasks_edition before update of state on {schema}.tasks
    for each row when (old.state is distinct from new.state) execute function {schema}.refuse_lease()
""",
    "14_leases": """-- A view that code of the version before reads gets a column more.
do $$
begin
    execute 'create or replace view {schema}.leases as select old.*, 0 as edition from ('
        || rtrim(pg_get_viewdef('{schema}.leases'::regclass), ';') || ') old';
end $$
""",
    "20_tasks_pending_next": """-- Replaces tasks_pending, which code of the version before still uses: a later migration drops that one.
create index {concurrently} tasks_pending_next on {schema}.tasks (queue, priority, enqueued_at, id, name, edition)
    where state = 'PENDING' and serial is null and needs_id is null
""",
}
NEEDS: Final = f"json_build_object('arguments', json_build_array('n'), 'edition', {NEXT})"
CHANGES: Final = (
    ("sql/task/insert_task.sql", "serial_at, gates, costs, labels\n", "serial_at, gates, costs, labels, edition, needs, needs_id\n"),
    (
        "sql/task/insert_task.sql",
        "%(labels)s::text::jsonb\n",
        f"""%(labels)s::text::jsonb,
    case when %(name)s = 'newer' then {NEXT} else {CODE} end,
    case when %(name)s = 'newer' then {NEEDS} end,
    case when %(name)s = 'newer' then {{schema}}.mark_of('newer', {NEEDS}) end
""",
    ),
    ("sql/task/claim_tasks.sql", "    set state = case when p.begins", f"    set leased_by = {NEXT}, state = case when p.begins"),
    ("domain/task/needs.py", "    arguments: list[str] | None = None\n", f"    arguments: list[str] | None = None\n    edition: int = {CODE}\n"),
)  # fmt: skip
"""The code changes of the next version: file, text, replacement."""


def next_edition(folder: Path) -> Path:
    """Make the code of the next version; return the value for PYTHONPATH."""
    place = next_version(folder, STATEMENTS)
    for name, old, new in CHANGES:
        file = place / "everbeat" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} no longer holds what the next version changes: {old}"
        file.write_text(text.replace(old, new), encoding="utf-8")
    return place
