-- Takes a bench's name for this session, unless another session has it. Behind a transaction pooler it means nothing.
select pg_try_advisory_lock(%(lock_key)s)
