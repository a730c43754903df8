-- One row for each line with live tasks. The tasks of a strict line share a serial key, and run one at a time. The tasks of another line
-- agree in queue, priority, name, gates and costs. R: a claim can take the first task now. W: the first task is due at `at`. B: the line
-- waits for the gate `blocked`. In R, the reservation of `blocked` does not stop the line. I: the line has nothing to claim. Claims read
-- only lines in R, in the order of `turn`. `reader` is the name of the first task, or its needs_id if only some workers can run it. No
-- PENDING task of the line comes before (`floor`, `floor_id`), so claims do not read the index entries of the tasks that have been taken.
-- `credit` is the rest of a turn that a full gate or the end of a claim has cut short. `prunes`: a limit of the line keeps only some of its
-- waiting tasks.
create table {schema}.lines (
    line      text primary key,
    is_strict boolean not null,
    state     "char" not null default 'I',
    reader    text,
    suspect   boolean not null default false,
    queue     text,
    priority  smallint,
    name      text,
    gates     text[],
    costs     integer[],
    at        timestamptz,
    turn      timestamptz,
    blocked   text,
    fair      boolean not null default false,
    weight    integer not null default 1,
    credit    integer not null default 0,
    prunes    boolean not null default false,
    floor     {schema}.endless not null default '-infinity',
    floor_id  uuid not null default '00000000-0000-0000-0000-000000000000'
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
