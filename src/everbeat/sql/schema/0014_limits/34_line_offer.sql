-- A line that a claim has locked. The claim takes at most `room` tasks of it. If `room` is -1, no task of it waits. The line then waits for
-- the gate `full_gate`, if any. The reservation of the gate `passed` does not stop it. `place` is where its row is in the table.
create type {schema}.line_offer as (
    line text, is_strict boolean, reader text, suspect boolean, queue text, priority smallint, name text, gates text[], costs integer[],
    is_fair boolean, weight integer, credit integer, floor timestamptz, floor_id uuid, room integer, full_gate text, passed text, place tid, prunes boolean
)
