-- For tasks that are sent, as many as one statement sends. The relay is told what to publish where that is one task, due now; while nobody
-- has the turn, the workers are told instead.
create function {schema}.write_sent() returns trigger language plpgsql as $$
declare
    relay record;
    written record;
begin
    select r.listens, r.channel, r.taken_until > statement_timestamp() as manned into relay from {schema}.relay r where r.taken_until > statement_timestamp() - interval '1 hour';
    if not found then
        return null;
    end if;
    if relay.manned and not relay.listens then
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
    if written.rows > 0 and not relay.manned then
        perform pg_notify(relay.channel, 't:' || left(s.queue, 1000)) from (select distinct queue from sent) s;
    elsif written.rows > 0 then
        perform pg_notify(
            relay.channel,
            case when written.rows = 1 and written.due_at <= statement_timestamp()
                then 'o:' || written.id || ':' || written.task_id || ':' || left(written.queue, 1000) else 'o:' end
        );
    end if;
    return null;
end
$$
