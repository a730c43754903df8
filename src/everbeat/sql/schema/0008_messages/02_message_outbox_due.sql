-- The relay walks this index: each queue, first due first published.
create index message_outbox_due on {schema}.message_outbox (queue, due_at, id) where place is null
