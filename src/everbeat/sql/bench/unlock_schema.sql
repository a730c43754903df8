-- Release the lock on the name of a benchmark schema.
select pg_advisory_unlock(%(lock_key)s)
