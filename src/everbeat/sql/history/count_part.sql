-- Count the tasks of a partition of `history` that a retention pass deletes, with their records: one step of a scan of the primary key. Tasks of
-- workflows that the pass keeps are not counted. Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select h.id, h.workflow_id, cardinality(h.attempts) as attempts, cardinality(h.recoveries) as recoveries, cardinality(h.steps) as steps,
        cardinality(h.signals) as signals
    from {schema}.history h
    where h.ended_at >= %(since)s and h.ended_at < %(until)s and h.id > %(after)s
    order by h.id
    limit %(limit)s
)
select
    case when (select count(*) from looked) = %(limit)s then (select l.id from looked l order by l.id desc limit 1) end as next_after,
    count(*) as tasks, coalesce(sum(l.attempts), 0)::bigint as attempts, coalesce(sum(l.recoveries), 0)::bigint as recoveries,
    coalesce(sum(l.steps), 0)::bigint as steps, coalesce(sum(l.signals), 0)::bigint as signals
from looked l
where (select w.id from {schema}.workflows w where w.id = l.workflow_id and not {fragment/is_old_workflow}) is null
