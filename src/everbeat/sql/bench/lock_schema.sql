-- Lock the name of a benchmark schema for this session, unless another session holds the lock. Behind a transaction pooler, the lock has no
-- effect.
select pg_try_advisory_lock(%(lock_key)s)
