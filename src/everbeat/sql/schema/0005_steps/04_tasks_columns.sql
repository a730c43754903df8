-- The event that a suspended task is waiting for (null: only for a time), and the latest time at which the task is due. Both are set while
-- the code is still running, so that a signal finds them. An attempt that ends without being suspended clears them.
alter table {schema}.tasks
    add column waits_for text, add column wake_at timestamptz
