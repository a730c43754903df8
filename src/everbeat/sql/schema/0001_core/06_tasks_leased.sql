-- Everything in flight, by holder: for beats, sweeps and burials.
create index tasks_leased on {schema}.tasks (claimed_by_worker_id) where state in ('CLAIMED', 'RUNNING')
