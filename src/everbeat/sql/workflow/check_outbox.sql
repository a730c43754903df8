-- Return whether any workflow event is waiting in the outbox.
select exists (select from {schema}.outbox) as happened
