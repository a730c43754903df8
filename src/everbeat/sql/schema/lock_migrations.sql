-- Lock the migrations: one process migrates, and others wait until its transaction ends.
select pg_advisory_xact_lock(%(lock_key)s)
