-- The turn of a cluster service, taken for one interval. There is no row if another tree has the turn. A turn with a start in the future counts
-- as released: the clock has been set back since, and the turn might end hours later. So a turn blocks other trees for at most one
-- interval, no matter how the clock changes. `clock_timestamp()` is used because this statement might have begun before the statement that
-- took the turn. A turn that ends more than a day after a turn taken now was not written by everbeat and counts as released. The first
-- condition only saves work: a conflict locks the row and writes, even if the turn is not free.
insert into {schema}.turns as t (service, taken_at, taken_until, taken_by)
select %(service)s, statement_timestamp(), statement_timestamp() + %(interval_ms)s * interval '1 millisecond', %(taken_by)s
where not exists (
    select from {schema}.turns t
    where t.service = %(service)s and t.taken_by <> %(taken_by)s and t.taken_until > statement_timestamp()
      and t.taken_at <= clock_timestamp() and t.taken_until <= statement_timestamp() + (%(interval_ms)s + 86400000) * interval '1 millisecond'
)
on conflict (service) do update
set taken_at = excluded.taken_at, taken_until = excluded.taken_until, taken_by = excluded.taken_by
where t.taken_until <= statement_timestamp() or t.taken_at > clock_timestamp()
   or t.taken_until > excluded.taken_until + interval '1 day' or t.taken_by = excluded.taken_by
returning service
