-- Delete the key of a deleted task. A row that a sender is taking over is left to the sender.
create or replace function {schema}.drop_key() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    delete from {schema}.unique_keys u
    where (u.name, u.key) in (
        select own.name, own.key from {schema}.unique_keys own
        where own.name = old.name and own.key = old.unique_key and own.task_id = old.id
        for update skip locked
    );
    return null;
end
$$
