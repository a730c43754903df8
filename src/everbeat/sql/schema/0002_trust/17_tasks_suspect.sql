-- Suspects that wait: few, so that looking for them costs nothing when there are none.
create index tasks_suspect on {schema}.tasks (enqueued_at) where state = 'PENDING' and suspect
