-- Unprocessed events of batches. Without a state: `number` tasks were added (0: the batch was sealed). With a state: `number` tasks ended in
-- this state (-1: an operator retried a task, so it is live again). An event is written in the transaction of the change, so a batch
-- never ends too early, and each change is counted once.
create table {schema}.batch_events (
    batch_id  uuid not null,
    id        bigint generated always as identity,
    state     text,
    number    integer not null,
    primary key (batch_id, id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000)
