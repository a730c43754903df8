-- Record the end of a task of a batch, or its retry by an operator, in the transaction of the change. Code of earlier versions settles tasks
-- of batches, too, so this must be a trigger. The events of a batch are only counted later. Two tasks that end at the same time could
-- otherwise each find the other one live. The caller needs no privileges on the table that is written here.
create function {schema}.note_batch_event() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if new.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') then
        insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, new.state, 1);
    else
        insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, old.state, -1);
    end if;
    return null;
end
$$
