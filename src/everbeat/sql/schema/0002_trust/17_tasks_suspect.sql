-- Waiting suspects. There are few of them, so a search costs nothing if there are none.
create index tasks_suspect on {schema}.tasks (enqueued_at) where state = 'PENDING' and suspect
