-- Write the message of a task that became PENDING again or became due earlier: the task was recovered, released, retried or woken.
-- The function sends no notification while PostgreSQL's notification queue is at least half full, because a full queue makes commits fail.
create or replace function {schema}.write_again() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    relay record;
begin
    if new.enqueued_at = 'infinity' then
        return null;
    end if;
    select r.listens, r.channel, r.taken_until > statement_timestamp() and not r.failing as works into relay
    from {schema}.relay r where r.taken_until > statement_timestamp() - interval '1 hour';
    if found then
        insert into {schema}.message_outbox (task_id, queue, fence, due_at) values (new.id, new.queue, new.fence, new.enqueued_at);
        if not relay.works then
            perform pg_notify(relay.channel, case when octet_length(new.queue) < 7000 then 't:' || new.queue else '*' end)
            where (select pg_notification_queue_usage()) < 0.5;
        elsif relay.listens then
            perform pg_notify(relay.channel, 'o:') where (select pg_notification_queue_usage()) < 0.5;
        end if;
    end if;
    return null;
end
$$
