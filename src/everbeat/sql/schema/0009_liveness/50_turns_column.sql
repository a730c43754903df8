-- The time at which a turn was taken. A time in the future shows that the clock has been set back since.
alter table {schema}.turns add column taken_at timestamptz not null default '-infinity'
