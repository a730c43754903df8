-- Before a send takes a key, delete the row of that key if the key is free. The trigger handles the keys of a statement one at a time, in
-- the order of the insert, so two such statements cannot deadlock. It reads the newest row, and not that of the statement's snapshot. The row of
-- the same task is kept, so a send that runs twice does not take the key of a task that has ended.
create or replace function {schema}.clear_key() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from {schema}.unique_keys u
    where u.name = new.name and u.key = new.key and u.until <= statement_timestamp() and u.task_id <> new.task_id;
    return new;
end
$$
