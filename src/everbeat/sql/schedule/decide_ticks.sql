-- Store what one pass decided about the ticks of schedules, and send their tasks: nothing -> PENDING. A decision counts only if its schedule
-- is still as the pass read it (decided_to, changed_at), so of two passes one decides a tick. Each row is found by its key, because a join
-- read whole tables before they had statistics, and took a second per page. A tick that has a row already is left as it is,
-- for example after the clock was set back. All parts of a decision are stored, or none.
-- The subqueries `(select …) is null` look up one row each; `not exists` can become a scan of the whole table.
-- If a live task has the key of the run, the tick is SKIPPED. If a tick cancels the earlier runs, with their children: PENDING | CLAIMED ->
-- CANCELLED at once; for RUNNING tasks, request a cancel. Return the changed schedules, the number of tasks that were sent, and the ids of cancelled tasks.
with recursive decided as materialized (
    select d.* from json_to_recordset(%(decisions)s::text::json) as d (
        name text, seen_decided_to timestamptz, seen_changed_at timestamptz, decided_to timestamptz, next_at timestamptz, ticks json,
        has_ended boolean, pauses text, resumes boolean
    )
), held as materialized (
    select s.*, d.ticks
    from (select * from decided order by name) d
    cross join lateral (
        select s.name, s.task, s.args, s.queue, s.priority, s.key, s.policy, s.flags, s.serial, s.gates, s.costs, s.labels
        from {schema}.schedules s
        where s.name = d.name and s.decided_to = d.seen_decided_to and (d.seen_changed_at is null or s.changed_at = d.seen_changed_at)
          and s.retired_at is null and s.ended_at is null
          and case when d.resumes then s.paused_at is not null and s.resume_at <= statement_timestamp() else s.paused_at is null end
        for no key update
    ) s
), tick as materialized (
    select h.name as schedule, k.*
    from held h
    cross join lateral json_to_recordset(h.ticks) as k ({fragment/tick_fields})
    where (select o.at from {schema}.ticks o where o.schedule = h.name and o.at = k.at) is null
), inserted as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, key, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, schedule, tick, gates, costs, labels
    )
    select
        k.task_id, h.task, h.queue, h.priority, h.args, h.key, h.policy, h.flags, k.good_until, line.serial, statement_timestamp(),
        statement_timestamp(), case when line.serial is not null then statement_timestamp() end, h.name, k.at, h.gates, h.costs, h.labels
    from tick k
    join held h on h.name = k.schedule
    cross join lateral (select coalesce(h.serial, case when k.is_serial then 'schedule:' || h.name end) as serial) line
    where k.outcome = 'SENT'
    order by h.task, h.key, k.at, k.task_id
    on conflict do nothing
    returning id, queue, schedule
), stored as (
    insert into {schema}.ticks (schedule, at, outcome, task_id, reason, detail, last_at, missed, decided_by)
    select
        k.schedule, k.at, case when other.is_in_the_way then 'SKIPPED' else k.outcome end,
        case when not other.is_in_the_way then k.task_id end, case when other.is_in_the_way then 'OVERLAP' else k.reason end,
        case
            when other.is_in_the_way then coalesce(
                'task ' || (
                    select t.id from {schema}.tasks t
                    join held h on h.task = t.name and h.key = t.key
                    where h.name = k.schedule and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
                ) || ' has the key', 'another task has the key')
            else k.detail
        end,
        k.last_at, k.missed, %(decided_by)s
    from tick k
    cross join lateral (
        select k.outcome = 'SENT' and not exists (select from inserted i where i.id = k.task_id)
            and (select t.id from {schema}.tasks t where t.id = k.task_id) is null as is_in_the_way
    ) other
    order by k.schedule, k.at
    on conflict do nothing
    returning schedule
), moved as (
    update {schema}.schedules s
    set decided_to = d.decided_to,
        next_at = case when d.resumes then statement_timestamp() when not d.has_ended and d.pauses is null then d.next_at end,
        ended_at = case when d.has_ended then statement_timestamp() end,
        paused_at = case when d.pauses is not null then statement_timestamp() end,
        paused_by = case when d.pauses is not null then %(paused_by)s end,
        pause_reason = d.pauses, resume_at = null,
        held_until = case when d.resumes then greatest(s.held_until, least(s.resume_at, statement_timestamp())) else s.held_until end,
        held_because = case when d.resumes then 'PAUSED' else s.held_because end,
        changed_at = case
            when d.resumes or d.pauses is not null then greatest(statement_timestamp(), s.changed_at + interval '1 microsecond')
            else s.changed_at
        end,
        runs = s.runs + (select count(*) from inserted i where i.schedule = s.name)
    from held h
    join decided d on d.name = h.name
    where s.name = h.name
    returning s.name
), family (id) as (
    select t.id from {schema}.tasks t
    where t.schedule = any(array(select k.schedule from tick k where k.cancels)) and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
    union
    select t.id from family f join {schema}.all_tasks t on t.parent_id = f.id
), doomed as materialized (
    select t.id, t.state from {schema}.tasks t
    where t.id = any(array(select f.id from family f)) and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
      and (t.state <> 'RUNNING' or t.cancel_requested_at is null)
    order by t.id
    for no key update
), ended as (
    update {schema}.tasks t
    set state = 'CANCELLED', cancelled_at = statement_timestamp(), cancel_requested_at = coalesce(t.cancel_requested_at, statement_timestamp()),
        claim_id = null, claim_call = null, next_retry_at = null,
        error = json_build_object('code', 'TASK_CANCELLED', 'message', coalesce('cancelled by the next run of schedule ' || t.schedule, 'cancelled with its parent'))
    where t.id = any(array(select d.id from doomed d where d.state <> 'RUNNING'))
    returning t.id, t.queue, t.serial
), asked as (
    update {schema}.tasks t
    set cancel_requested_at = statement_timestamp()
    where t.id = any(array(select d.id from doomed d where d.state = 'RUNNING'))
    returning t.id
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 't:' || left(i.queue, 1000) as payload from inserted i
        where (select count(*) from inserted) >= 100 or exists (select from {schema}.workers w where w.listens and w.ended_at is null)
        union
        select 't:' || left(e.queue, 1000) from ended e where e.serial is not null
        union
        select 'd:' || string_agg(e.id::text, ',') from (select id, (row_number() over () - 1) / 200 as part from ended) e group by e.part
        union
        select 'l:' || string_agg(e.id::text, ',')
        from (
            select ended.id, (row_number() over () - 1) / 200 as part from ended join doomed d on d.id = ended.id where d.state = 'CLAIMED'
        ) e group by e.part
        union
        select 'c:' || a.id from asked a
    ) hints
)
select null::text as changed, null::uuid as cancelled, (select count(*) from inserted) as sent, (select hints from hint) as hints
union all
select m.name, null, null, null from moved m
union all
select null, e.id, null, null from ended e
union all
select null, a.id, null, null from asked a
