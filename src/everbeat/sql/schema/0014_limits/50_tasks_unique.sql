-- The key of a task whose key stays taken for another span than its life (`unique_for`): 'waiting', 'kept', or a period after its end, as
-- text of an interval. `last_send` is the id of the last send that changed the task while it waited.
alter table {schema}.tasks
    add column unique_key text, add column unique_for text, add column last_send uuid
