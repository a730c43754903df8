-- Claims scan this index. A lane is one (queue, priority), first in, first out. The index does not contain tasks of serial lines.
create index tasks_pending on {schema}.tasks (queue, priority, enqueued_at, id, name) where state = 'PENDING' and serial is null
