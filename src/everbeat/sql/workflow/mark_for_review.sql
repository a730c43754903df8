-- Mark these workflows to be checked as a whole.
insert into {schema}.outbox (workflow_id, node) select a.id, null from unnest(%(ids)s::text::uuid[]) as a (id)
