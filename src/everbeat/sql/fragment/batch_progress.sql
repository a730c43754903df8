-- The unprocessed events and the live tasks of a batch `b`.
cross join lateral (
    select
        coalesce(sum(e.number) filter (where e.state is null), 0) as total,
        coalesce(sum(e.number) filter (where e.state = 'COMPLETED'), 0) as completed,
        coalesce(sum(e.number) filter (where e.state = 'FAILED'), 0) as failed,
        coalesce(sum(e.number) filter (where e.state = 'CANCELLED'), 0) as cancelled,
        coalesce(sum(e.number) filter (where e.state = 'EXPIRED'), 0) as expired
    from {schema}.batch_events e where e.batch_id = b.id
) e
cross join lateral (
    select count(*) filter (where t.state <> 'RUNNING') as waiting, count(*) filter (where t.state = 'RUNNING') as running
    from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
) live
