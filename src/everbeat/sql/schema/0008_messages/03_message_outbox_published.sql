-- What is out, by queue and age: how much that is, what can go, what may have been lost.
create index message_outbox_published on {schema}.message_outbox (queue, published_at, id) where place is not null
