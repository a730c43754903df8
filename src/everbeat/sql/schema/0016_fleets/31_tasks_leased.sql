-- All leased tasks by their holder, for heartbeats, sweeps and the ending of workers, and by the call that claimed them. A repeated claim
-- finds its own tasks without the others that its worker has held. The index keeps those while a transaction has an old snapshot.
create index {concurrently} tasks_leased on {schema}.tasks (claimed_by_worker_id, claim_call) where state in ('CLAIMED', 'RUNNING')
