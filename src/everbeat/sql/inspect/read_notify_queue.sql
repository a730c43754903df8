-- Return how full PostgreSQL's notification queue is, and the session that holds up the queue if its pid is given. Without a pid, return
-- the sessions with the oldest transactions instead, because a listening session reads no notifications during a transaction. At least one
-- row is returned.
select q.used, a.pid, a.who, a.age_s
from (select pg_notification_queue_usage() as used) q
left join (
    select
        s.pid, concat_ws(' ', nullif(s.application_name, ''), 'of', s.usename, '(' || s.state || ')') as who,
        extract(epoch from statement_timestamp() - coalesce(s.xact_start, s.state_change))::float8 as age_s
    from pg_stat_activity s
    where case when %(pid)s::integer is null
        then s.xact_start is not null and s.backend_type = 'client backend' and s.pid <> pg_backend_pid()
        else s.pid = %(pid)s::integer end
) a on true
order by a.age_s desc nulls last
limit 5
