-- Store a signal, and make the tasks due that are waiting for it. This must be a function, so that each of its statements sees all earlier
-- commits. It takes the lock first, and a task that begins to wait takes the same lock. So this function finds a task that is already
-- waiting. A task that begins to wait later sees the signal, because it reads the signals again after it has recorded the wait. Lock order:
-- workflow, then tasks by id.
-- Return "stored", even for a repeated call. If nothing was written, return "ended" with the state, or "unknown".
-- The function sends no notification while PostgreSQL's notification queue is at least half full, because a full queue makes commits fail.
create or replace function {schema}.send_signal(signal_id uuid, target_id uuid, event text, content json, channel text)
returns table (verdict text, kind text, state text) language plpgsql as $$
declare
    hints bigint;
begin
    select 'task', t.state into kind, state from {schema}.tasks t where t.id = target_id for no key update;
    if not found then
        select 'workflow', w.state into kind, state from {schema}.workflows w where w.id = target_id for no key update;
    end if;
    if kind is null then
        select 'task', h.state into kind, state from {schema}.history h where h.id = target_id;
    end if;
    verdict := case
        when exists (select from {schema}.signals s where s.id = signal_id) then 'stored'
        when kind is null then 'unknown'
        when state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') then 'ended'
    end;
    if verdict is null then
        verdict := 'stored';
        insert into {schema}.signals (id, target, name, value) values (signal_id, target_id, event, content);
        if kind = 'workflow' then
            perform from {schema}.tasks t where t.workflow_id = target_id and t.waits_for = event order by t.id for no key update;
        end if;
        with woken as (
            update {schema}.tasks t
            set wake_at = statement_timestamp(),
                enqueued_at = case when t.state = 'PENDING' then least(t.enqueued_at, statement_timestamp()) else t.enqueued_at end
            where t.id = any(
                    case kind
                        when 'task' then array[target_id]
                        else array(select w.id from {schema}.tasks w where w.workflow_id = target_id and w.waits_for = event)
                    end
                )
              and t.waits_for = event and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
            returning t.queue
        )
        select count(pg_notify(channel, 't:' || left(queues.queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) into hints from (select distinct woken.queue from woken) queues;
    end if;
    return next;
end
$$
