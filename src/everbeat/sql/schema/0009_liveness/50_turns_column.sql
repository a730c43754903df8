-- When a turn was taken: a moment that lies ahead shows that the clock was set back since then.
alter table {schema}.turns add column taken_at timestamptz not null default '-infinity'
