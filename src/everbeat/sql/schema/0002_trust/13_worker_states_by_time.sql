-- The oldest snapshots, for retention.
create index worker_states_by_time on {schema}.worker_states (at)
