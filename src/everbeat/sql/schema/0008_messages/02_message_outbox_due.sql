-- The relay scans this index: in each queue, the first due row is published first.
create index message_outbox_due on {schema}.message_outbox (queue, due_at, id) where place is null
