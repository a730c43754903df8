-- For a task that became PENDING again, or due earlier: recovered, given back, tried again, woken.
create function {schema}.write_again() returns trigger language plpgsql as $$
declare
    relay record;
begin
    if new.enqueued_at = 'infinity' then
        return null;
    end if;
    select r.listens, r.channel, r.taken_until > statement_timestamp() as manned into relay from {schema}.relay r where r.taken_until > statement_timestamp() - interval '1 hour';
    if found then
        insert into {schema}.message_outbox (task_id, queue, fence, due_at) values (new.id, new.queue, new.fence, new.enqueued_at);
        if not relay.manned then
            perform pg_notify(relay.channel, 't:' || left(new.queue, 1000));
        elsif relay.listens then
            perform pg_notify(relay.channel, 'o:');
        end if;
    end if;
    return null;
end
$$
