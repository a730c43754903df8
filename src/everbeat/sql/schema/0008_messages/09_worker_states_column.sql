-- The state of a worker's connection to NATS.
alter table {schema}.worker_states add column messages json
