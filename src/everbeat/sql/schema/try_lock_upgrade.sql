-- One session upgrades: true if it is this one. A session that waited here would keep a snapshot, and "create index concurrently" of the
-- session that has the lock would wait for that snapshot. So the others ask again and again.
select pg_try_advisory_lock(%(lock_key)s)
