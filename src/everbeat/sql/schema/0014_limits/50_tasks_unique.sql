-- The key of a task whose key is not taken exactly while the task is live. `unique_for` is 'waiting', 'kept', or the text of an interval
-- after the end of the task. `last_send` is the id of the last send that changed the task while it waited.
alter table {schema}.tasks
    add column unique_key text, add column unique_for text, add column last_send uuid
