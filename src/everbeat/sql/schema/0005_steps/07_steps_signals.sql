-- Finds whether a task has received a signal.
create unique index steps_signals on {schema}.steps (task_id, signal_id) where signal_id is not null
