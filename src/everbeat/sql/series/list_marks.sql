-- List the events between two times that charts mark, oldest first, at most `limit` of each kind. A deploy is the first start of a worker with
-- task functions or parameters that no worker had before. Workers that ended long ago are deleted. So a start before the first end
-- that is still known proves nothing. The table of workers has at most thousands of rows. audit_log_marks finds the actions of
-- operators, and recoveries_by_time the deaths.
with first_starts as (
    select min(w.started_at) as at, min(w.id) as id from {schema}.workers w where w.metadata is not null group by md5(w.metadata::text)
), deploys as (
    select f.at, 'deploy' as kind, f.id as words, null::bigint as tasks
    from first_starts f
    where f.at >= %(since)s and f.at < %(until)s
      and f.at > (select min(w.ended_at) from {schema}.workers w) and f.at > (select min(w.started_at) from {schema}.workers w)
    order by f.at desc
    limit %(limit)s
), actions as (
    select l.at, l.action as kind, concat_ws(' by ', coalesce(l.target, ''), l.actor) as words, null::bigint as tasks
    from {schema}.audit_log l
    where l.at >= %(since)s and l.at < %(until)s and l.action in ('pause', 'resume', 'set_limit', 'clear_limit')
    order by l.at desc, l.id desc
    limit %(limit)s
), recovered as (
    select r.noticed_at, r.cause, coalesce(r.supervisor_id, r.worker_id) as party, r.supervisor_id, r.hostname, r.noticed_by
    from {schema}.recoveries r
    where r.noticed_at >= %(since)s and r.noticed_at < %(until)s and r.noticed_by not in ('operator', 'progress')
    order by r.noticed_at desc
    limit %(most_recoveries)s
), deaths as (
    select
        min(x.noticed_at) as at, case when bool_or(strpos(x.cause, %(mass)s) > 0) then 'silence' else 'death' end as kind,
        case when bool_and(x.noticed_by = 'child_exit') then 'a process of ' else '' end || coalesce(min(s.slot), min(x.hostname), min(x.party)) as words, count(*) as tasks
    from recovered x
    left join {schema}.supervisors s on s.id = x.supervisor_id
    group by x.party, date_bin('1 minute', x.noticed_at, timestamptz '2000-01-01 00:00+00')
    order by 1 desc
    limit %(limit)s
)
select m.at, m.kind, m.words, m.tasks
from (
    select d.* from deploys d
    union all
    select a.* from actions a
    union all
    select x.* from deaths x
) m
order by m.at, m.kind, m.words
