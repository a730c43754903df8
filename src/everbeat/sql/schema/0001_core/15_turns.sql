-- One row per cluster service: the holder of the turn, and the time at which the turn ends. Turns allow one pass per interval without a
-- leader.
create table {schema}.turns (
    service      text primary key,
    taken_until  timestamptz not null,
    taken_by     text not null
)
