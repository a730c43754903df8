-- Return whether any event of a workflow or a batch is waiting. An ordered search also ends soon if many deleted events are still in the index.
select exists (select from {schema}.outbox) or (
    select e.batch_id from {schema}.batch_events e order by e.batch_id, e.id limit 1
) is not null as happened
