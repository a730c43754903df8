-- Stores a signal and makes due whoever waits for it. A function, because each statement in it sees what was committed before it began:
-- the lock comes first, and whoever begins to wait takes the same one. So a task that began before is found here, and one that begins
-- afterwards sees the signal (it looks once more when it has said what it waits for). Lock order: workflow, then tasks by id.
-- Answers "stored", also to a repeated call; "ended" with the state, "unknown": then nothing is written.
-- Sends no notification while PostgreSQL's queue of notifications is half full: a full one refuses the commit.
create or replace function {schema}.send_signal(signal_id uuid, target_id uuid, event text, content json, channel text)
returns table (verdict text, kind text, state text) language plpgsql as $$
declare
    hints bigint;
begin
    select 'task', t.state into kind, state from {schema}.tasks t where t.id = target_id for no key update;
    if not found then
        select 'workflow', w.state into kind, state from {schema}.workflows w where w.id = target_id for no key update;
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
