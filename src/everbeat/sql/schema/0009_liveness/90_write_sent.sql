-- Write the messages of all tasks that one statement sends. The relay is notified if the statement sends a single task that is due now. The
-- workers are notified instead if no relay is publishing, or if the stream rejects all messages. The sender needs no privileges on the
-- tables that are written here.
-- The function sends no notification while PostgreSQL's notification queue is at least half full, because a full queue makes commits fail.
create or replace function {schema}.write_sent() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    relay record;
    written record;
begin
    select r.listens, r.channel, r.taken_until > statement_timestamp() and not r.failing as works into relay
    from {schema}.relay r where r.taken_until > statement_timestamp() - interval '1 hour';
    if not found then
        return null;
    end if;
    if relay.works and not relay.listens then
        insert into {schema}.message_outbox (task_id, queue, fence, due_at)
        select s.id, s.queue, 0, s.enqueued_at from sent s where s.state = 'PENDING' and s.enqueued_at < 'infinity';
        return null;
    end if;
    with fresh as (
        insert into {schema}.message_outbox (task_id, queue, fence, due_at)
        select s.id, s.queue, 0, s.enqueued_at from sent s where s.state = 'PENDING' and s.enqueued_at < 'infinity'
        returning id, task_id, queue, due_at
    )
    select count(*) as rows, max(id) as id, max(task_id::text) as task_id, max(queue) as queue, max(due_at) as due_at into written from fresh;
    if written.rows > 0 and not relay.works then
        perform pg_notify(relay.channel, case when octet_length(s.queue) < 7000 then 't:' || s.queue else '*' end)
        from (select distinct queue from sent) s
        where (select pg_notification_queue_usage()) < 0.5;
    elsif written.rows > 0 then
        perform pg_notify(
            relay.channel,
            case when written.rows = 1 and written.due_at <= statement_timestamp() and octet_length(written.queue) < 7000
                then 'o:' || written.id || ':' || written.task_id || ':' || written.queue else 'o:' end
        )
        where (select pg_notification_queue_usage()) < 0.5;
    end if;
    return null;
end
$$
