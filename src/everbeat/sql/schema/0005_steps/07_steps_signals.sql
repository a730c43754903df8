-- Whether a task has had a signal.
create unique index steps_signals on {schema}.steps (task_id, signal_id) where signal_id is not null
