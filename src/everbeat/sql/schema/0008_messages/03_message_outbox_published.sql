-- Published rows by queue and age: to count them, to delete them, and to find rows whose messages might be lost.
create index message_outbox_published on {schema}.message_outbox (queue, published_at, id) where place is not null
