-- Enable messages by creating the triggers, which cost nothing until the first worker uses messages. Return whether messages were already
-- in use. Creating a trigger waits for transactions that are writing tasks, and senders wait behind it. The wait is therefore kept short,
-- and the caller tries again.
create or replace function {schema}.use_messages(told_on text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    was boolean;
begin
    if not {schema}.caller_can('UPDATE', '{schema}.tasks') then
        raise insufficient_privilege using message = 'permission denied to use messages: it needs UPDATE on the table tasks';
    end if;
    perform set_config('lock_timeout', '300ms', true);
    perform pg_advisory_xact_lock(hashtextextended(told_on || ' messages', 0));
    select r.in_use into was from {schema}.relay r;
    if was then
        return was;
    end if;
    create trigger tasks_written after insert on {schema}.tasks
        referencing new table as sent for each statement execute function {schema}.write_sent();
    create trigger tasks_written_again after update of state, enqueued_at on {schema}.tasks
        for each row
        when (new.state = 'PENDING' and (old.state <> 'PENDING' or new.enqueued_at < old.enqueued_at))
        execute function {schema}.write_again();
    create trigger workers_ended after update of ended_at on {schema}.workers
        for each row when (new.ended_at is not null and old.ended_at is null) execute function {schema}.free_relay();
    update {schema}.relay set in_use = true, channel = told_on;
    return was;
end
$$
