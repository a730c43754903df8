-- One row per cluster service: whose turn it is, and until when. Gives one pass per interval without a leader.
create table {schema}.turns (
    service      text primary key,
    taken_until  timestamptz not null,
    taken_by     text not null
)
