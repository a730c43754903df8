-- The snapshots of a worker, newest last.
create index worker_states_by_worker on {schema}.worker_states (worker_id, at)
