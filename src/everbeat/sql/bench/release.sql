-- Gives the name of a bench back.
select pg_advisory_unlock(%(lock_key)s)
