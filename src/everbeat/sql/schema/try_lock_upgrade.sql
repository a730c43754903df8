-- Try to lock the upgrade for this session; true if the lock was taken. A session that waited here would keep a snapshot. "create index
-- concurrently" in the session with the lock would wait for that snapshot. The other sessions therefore retry at intervals.
select pg_try_advisory_lock(%(lock_key)s)
