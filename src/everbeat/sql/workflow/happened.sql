-- Whether something has happened to workflows that nobody has acted on yet.
select exists (select from {schema}.outbox) as happened
