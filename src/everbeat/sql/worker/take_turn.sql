-- Takes the turn of a cluster service for one interval; no row when somebody else has it.
-- A turn that was taken at a moment that lies ahead is free: the clock was set back since then, and its end may be hours away. So a turn
-- blocks others for one interval at most, wherever the clock goes. clock_timestamp(), because this statement may have begun before the
-- one that took the turn. A turn that ends more than a day after one taken now was not written by everbeat, and is free.
insert into {schema}.turns as t (service, taken_at, taken_until, taken_by)
values (
    %(service)s, statement_timestamp(), statement_timestamp() + %(interval_ms)s * interval '1 millisecond', %(taken_by)s
)
on conflict (service) do update
set taken_at = excluded.taken_at, taken_until = excluded.taken_until, taken_by = excluded.taken_by
where t.taken_until <= statement_timestamp() or t.taken_at > clock_timestamp()
   or t.taken_until > excluded.taken_until + interval '1 day' or t.taken_by = excluded.taken_by
returning service
