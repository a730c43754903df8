-- Create the partition of `history` for tasks that ended at a time. Return false if a lock was not free soon.
select {schema}.add_history_part(%(at)s::timestamptz, %(unit)s::text) is not null
