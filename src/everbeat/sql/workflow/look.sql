-- These workflows are to be looked at as a whole.
insert into {schema}.outbox (workflow_id, node) select a.id, null from unnest(%(ids)s::text::uuid[]) as a (id)
