-- Delete the tasks of a partition of `history`, which all ended long ago: one step of a scan of the primary key. Tasks of existing workflows
-- are skipped, because they can still be retried. Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select h.id, h.workflow_id from {schema}.history h
    where h.ended_at >= %(since)s and h.ended_at < %(until)s and h.id > %(after)s
    order by h.id
    limit %(limit)s
), old as materialized (
    select l.id from looked l
    where (select w.id from {schema}.workflows w where w.id = l.workflow_id) is null
), gone as (
    delete from {schema}.history h
    where h.ended_at >= %(since)s and h.ended_at < %(until)s and h.id = any(array(select o.id from old o))
    returning h.id, coalesce(cardinality(h.attempts), 0) as attempts, coalesce(cardinality(h.recoveries), 0) as recoveries,
        coalesce(cardinality(h.steps), 0) as steps, coalesce(cardinality(h.signals), 0) as signals
), gone_labels as (
    delete from {schema}.labels l where l.id = any(array(select g.id from gone g))
)
select
    case when (select count(*) from looked) = %(limit)s then (select l.id from looked l order by l.id desc limit 1) end as next_after,
    count(*) as tasks, coalesce(sum(g.attempts), 0)::bigint as attempts, coalesce(sum(g.recoveries), 0)::bigint as recoveries,
    coalesce(sum(g.steps), 0)::bigint as steps, coalesce(sum(g.signals), 0)::bigint as signals
from gone g
