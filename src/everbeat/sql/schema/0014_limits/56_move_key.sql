-- Keep the key of a task in step with its state, for each statement that changes the state, also of older code. A `waiting` key is free once the task is claimed, and
-- taken again if the task is handed back before its code starts. A key with a period becomes free that long after the task ended. A task that
-- an operator retries takes its key again; if another task has the key, the retry is refused. `skip locked`: no worker waits for a sender.
-- A row is locked by a sender only if it is free already and the sender is taking it. A free key of a waiting task has the date -infinity, so
-- no clock that is set back makes it taken. A scope that everbeat never writes must not abort the statement of a worker, so its key is free.
create or replace function {schema}.move_key() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if new.state = 'PENDING' and old.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') then
        insert into {schema}.unique_keys as u (name, key, task_id) values (new.name, new.unique_key, new.id)
        on conflict (name, key) do update set until = null where u.task_id = excluded.task_id;
        if not found then
            perform {schema}.refuse_key(new.name, new.unique_key);
        end if;
    elsif new.unique_for = 'waiting' then
        update {schema}.unique_keys u
        set until = case when new.state <> 'PENDING' then '-infinity' end::timestamptz
        where (new.state <> 'PENDING' or old.state = 'CLAIMED' or new.attempt < old.attempt)
          and (u.name, u.key) in (
              select own.name, own.key from {schema}.unique_keys own
              where own.name = new.name and own.key = new.unique_key and own.task_id = new.id
              for no key update skip locked
          );
    elsif new.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') then
        update {schema}.unique_keys u
        set until = case
            when new.unique_for ~ '^[0-9]{{1,12}} milliseconds$' then statement_timestamp() + new.unique_for::interval else '-infinity'
        end
        where (u.name, u.key) in (
            select own.name, own.key from {schema}.unique_keys own
            where own.name = new.name and own.key = new.unique_key and own.task_id = new.id
            for no key update skip locked
        );
    end if;
    return null;
end
$$
