-- Hold nodes that are ready but are not to be enqueued now: their workflow is paused, or there are more nodes than one transition takes.
-- The state is compared as an expression, so that each node is found by its key and not among all open nodes.
with held as (
    update {schema}.nodes n
    set state = 'READY'
    from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)
    where n.workflow_id = a.workflow_id and n.number = a.number and n.state || '' = 'PENDING'
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select distinct a.workflow_id, -1 from unnest(%(ids)s::text::uuid[], %(again)s::text::boolean[]) as a (workflow_id, again) where a.again
)
select 1
