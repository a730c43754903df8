-- Make trees quiet, or resume them, and notify their workers to fetch the new orders. Trees are chosen by host, or by the id of the
-- supervisor or of one of its workers. Otherwise, all trees that have not ended are chosen. Return the chosen supervisors, each with its
-- workers. A repeated call changes nothing.
with chosen as materialized (
    select s.id from {schema}.supervisors s
    where s.ended_at is null and (
        %(everyone)s or s.hostname = %(host)s or s.id = any(%(ids)s::text[])
        or s.id in (select w.supervisor_id from {schema}.workers w where w.id = any(%(ids)s::text[]) and w.ended_at is null)
    )
), changed as (
    update {schema}.supervisors s
    set quiet_since = case when %(quiet)s then statement_timestamp() end
    from chosen c
    where s.id = c.id and (s.quiet_since is null) = %(quiet)s
    returning s.id, s.quiet_since
), hint as materialized (
    select pg_notify(%(channel)s, 'q') from (select from changed limit 1) one where (select pg_notification_queue_usage()) < 0.5
)
select
    s.id, s.hostname, s.pid, case when x.id is null then s.quiet_since else x.quiet_since end as quiet_since,
    array(select w.id from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null order by w.id) as workers,
    (select count(*) from hint) as hints
from chosen c
join {schema}.supervisors s on s.id = c.id
left join changed x on x.id = s.id
order by s.hostname, s.pid, s.id
