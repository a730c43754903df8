-- All leased tasks by their holder, for heartbeats, sweeps and the ending of workers.
create index tasks_leased on {schema}.tasks (claimed_by_worker_id) where state in ('CLAIMED', 'RUNNING')
