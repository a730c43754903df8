-- Count the events of batches, and end each sealed batch whose tasks have all ended. Its callbacks are sent, and the task that waits for it
-- becomes due. Batches that another session has locked are left for the next call. This must be a function, so that each of its statements sees all
-- earlier commits. A task's end and its event are committed together. So if the statement that looks for ended batches finds neither a live
-- task nor an event, every task of the batch has been counted. A batch only grows while it is open or while a task of it runs. Both were
-- committed before that statement, or prevent the end. A call counts at most 1,000 events of each batch.
-- Events of a deleted batch are deleted: retention deletes a batch, and an operator can retry a task of it later.
-- A callback that PostgreSQL can never store must not block other batches, so the batch notes the problem. Lock order: batches by id, then tasks by id.
-- Return how many batches had events, how many ended, and how many tasks are now due.
create function {schema}.advance_batches(p_channel text, p_most integer, out advanced bigint, out ended bigint, out enqueued bigint)
language plpgsql as $$
declare
    v_batches uuid[];
    v_ended uuid[];
    v_queues text[];
    v_batch record;
begin
    advanced := 0; ended := 0; enqueued := 0;
    select array_agg(l.id) into v_batches
    from (
        with recursive noted (id) as (
            (select e.batch_id from {schema}.batch_events e order by e.batch_id limit 1)
            union all
            select (select e.batch_id from {schema}.batch_events e where e.batch_id > n.id order by e.batch_id limit 1)
            from noted n where n.id is not null
        )
        select b.id from noted n join {schema}.batches b on b.id = n.id
        limit p_most
        for no key update of b skip locked
    ) l;
    if v_batches is null then
        with recursive noted (id) as (
            (select e.batch_id from {schema}.batch_events e order by e.batch_id limit 1)
            union all
            select (select e.batch_id from {schema}.batch_events e where e.batch_id > n.id order by e.batch_id limit 1)
            from noted n where n.id is not null
        )
        delete from {schema}.batch_events e
        where e.batch_id = any(array(
            select n.id from noted n where n.id is not null and not exists (select from {schema}.batches b where b.id = n.id)
        ));
        return;
    end if;
    advanced := cardinality(v_batches);
    with gone as (
        delete from {schema}.batch_events e
        using (
            select o.batch_id, o.id
            from unnest(v_batches) as b (id)
            cross join lateral (select e.batch_id, e.id from {schema}.batch_events e where e.batch_id = b.id order by e.id limit 1000) o
        ) old
        where e.batch_id = old.batch_id and e.id = old.id
        returning e.batch_id, e.state, e.number
    ), counted as (
        select g.batch_id, sum(g.number) filter (where g.state is null) as total, sum(g.number) filter (where g.state = 'COMPLETED') as completed,
            sum(g.number) filter (where g.state = 'FAILED') as failed, sum(g.number) filter (where g.state = 'CANCELLED') as cancelled,
            sum(g.number) filter (where g.state = 'EXPIRED') as expired
        from gone g group by g.batch_id
    )
    update {schema}.batches b
    set total = b.total + coalesce(c.total, 0), completed = b.completed + coalesce(c.completed, 0), failed = b.failed + coalesce(c.failed, 0),
        cancelled = b.cancelled + coalesce(c.cancelled, 0), expired = b.expired + coalesce(c.expired, 0)
    from counted c where b.id = c.batch_id;
    with whole as (
        update {schema}.batches b
        set ended_at = statement_timestamp()
        where b.id = any(v_batches) and b.sealed_at is not null and b.ended_at is null
          and b.completed + b.failed + b.cancelled + b.expired >= b.total
          and not exists (select from {schema}.batch_events e where e.batch_id = b.id)
          and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))
        returning b.id
    )
    select array_agg(w.id) into v_ended from whole w;
    if v_ended is null then
        return;
    end if;
    ended := cardinality(v_ended);
    with woken as (
        update {schema}.tasks t
        set wake_at = statement_timestamp(),
            enqueued_at = case when t.state = 'PENDING' then least(t.enqueued_at, statement_timestamp()) else t.enqueued_at end
        where t.id = any(array(
                select w.id from {schema}.tasks w
                where w.id = any(array(select b.waiter_id from {schema}.batches b where b.id = any(v_ended) and b.waiter_id is not null))
                  and w.state in ('PENDING', 'CLAIMED', 'RUNNING')
                order by w.id
                for no key update
            ))
          and exists (
              select from {schema}.batches b where b.id = any(v_ended) and b.waiter_id = t.id and t.waits_for = 'gather/' || b.name
          )
        returning t.queue
    )
    select array_agg(distinct w.queue), count(*) into v_queues, enqueued from woken w;
    for v_batch in
        select b.id, b.on_end, case when b.completed = b.total then b.on_success end as on_success from {schema}.batches b
        where b.id = any(v_ended) and (b.on_end is not null or b.on_success is not null)
        order by b.id
    loop
        begin
            with sent as (
                insert into {schema}.tasks (
                    id, name, queue, priority, args, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, gates, costs, labels
                )
                select
                    c.id, c.task, c.queue, c.priority, c.args::json, c.policy::json, c.flags::json, c.good_until, c.serial, statement_timestamp(),
                    statement_timestamp(), case when c.serial is not null then statement_timestamp() end, c.gates, c.costs,
                    c.labels
                from (values (v_batch.on_end), (v_batch.on_success)) as u (call)
                cross join lateral json_to_record(u.call) as c (
                    id uuid, task text, queue text, priority smallint, args text, policy text, flags text, good_until timestamptz, serial text,
                    gates text[], costs integer[], labels jsonb
                )
                where u.call is not null
                on conflict do nothing
                returning queue
            )
            select v_queues || array_agg(distinct s.queue), enqueued + count(*) into v_queues, enqueued from sent s;
        exception when data_exception or integrity_constraint_violation then
            update {schema}.batches b set problem = sqlerrm where b.id = v_batch.id;
        end;
    end loop;
    perform count(pg_notify(p_channel, 't:' || left(q.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5)
    from (select distinct unnest(v_queues) as queue) q where q.queue is not null;
end
$$
