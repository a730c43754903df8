-- Restore the declared numbers of a limit that an operator has set, and open the gates of the limit that its tasks have closed (RateLimited).
-- Return no row if the limit does not exist. The statement can be repeated.
with known as materialized (
    select l.name, d.* from {schema}.limits l
    cross join lateral json_to_record(coalesce(l.declared, '{{}}')) as d (
        concurrency integer, starts integer, period_s double precision, burst integer
    )
    where l.name = %(name)s
), changed as (
    update {schema}.limits l
    set concurrency = k.concurrency, starts = k.starts, period_s = k.period_s, burst = coalesce(k.burst, 1), set_by = null, set_at = null,
        reason = null, until = null
    from known k
    where l.name = k.name and l.set_by is not null
    returning l.name
), opened as (
    insert into {schema}.line_changes (gates, closed_until)
    select array[g.gate], '-infinity' from known k join {schema}.gates g on g.limit_name = k.name
    where g.closed_until > extract(epoch from statement_timestamp())
    returning 1
)
select k.name,
    case when (exists (select from changed) or exists (select from opened)) and (select pg_notification_queue_usage()) < 0.5
        then pg_notify(%(channel)s, '*') end
from known k
