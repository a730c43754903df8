-- Return the facts about a PENDING task: the live workers that serve its queue and know its name, their load, and the pauses. Also return
-- the tasks ahead of this task, which are earlier tasks of its serial line or its queue. Scheduled tasks of the queue are not read: the
-- statement counts one priority (lane) after the other. A worker that registered no names is assumed to
-- know all names. Counts stop at 1,001. `unfit` workers know the task's name but cannot run it with its arguments; the caller determines
-- them from the column `registered`.
with recursive mine as materialized (
    select t.* from {schema}.tasks t where t.id = %(id)s
), lost as materialized (
    select x.id from {schema}.trees_without_session() x
), beating as materialized (
    select w.id, w.supervisor_id, {schema}.object_of(w.metadata) as metadata, w.queues, s.quiet_since
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is null and not s.draining
      and greatest(s.last_beat_at, w.last_beat_at) > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
), living as materialized (
    select b.* from beating b where b.supervisor_id not in (select x.id from lost x)
), crew as materialized (
    select
        l.id, l.metadata, l.quiet_since, l.queues is null or mine.queue = any(l.queues) as serves,
        coalesce(l.metadata -> 'tasks' ? mine.name, true) as knows, l.id <> all(%(unfit)s::text[]) as fits,
        (l.metadata -> 'parameters' -> mine.name)::text as parameters
    from living l cross join mine
), executor as (
    select
        crew.id, own.names,
        coalesce(own.slots, (
            select x.slots from {schema}.worker_states x where x.worker_id = crew.id order by x.at desc limit 1
        )) as slots
    from crew
    cross join mine
    left join lateral (
        select
            case when jsonb_typeof(each.value -> 'slots') = 'number' then least((each.value ->> 'slots')::numeric, 1000000)::integer end as slots,
            each.value -> 'tasks' as names
        from jsonb_each(case when jsonb_typeof(crew.metadata -> 'executors') = 'object' then crew.metadata -> 'executors' end) each
        where each.value -> 'tasks' ? mine.name
        limit 1
    ) own on true
    where crew.serves and crew.knows and crew.fits and crew.quiet_since is null
), able as (
    select sum(executor.slots) as slots, sum(held.running) as running
    from executor
    cross join lateral (
        select count(*) as running from {schema}.tasks t
        where t.claimed_by_worker_id = executor.id and t.state in ('CLAIMED', 'RUNNING') and t.state = 'RUNNING'
          and (executor.names is null or executor.names ? t.name)
    ) held
    where not exists (select from executor where slots is null)
), line as (
    select other.* from mine
    cross join lateral (
        (
            select t.id, t.state, t.name, t.enqueued_at, t.serial_at from {schema}.tasks t
            where t.serial = mine.serial and t.serial is not null and not starts_with(t.serial, 'limit:') and t.state in ('CLAIMED', 'RUNNING')
            limit 1001
        )
        union all
        (
            select t.id, t.state, t.name, t.enqueued_at, t.serial_at from {schema}.tasks t
            where t.serial = mine.serial and t.serial is not null and not starts_with(t.serial, 'limit:') and t.state = 'PENDING'
              and (t.serial_at, t.id) < (mine.serial_at, mine.id) and t.fence < 9223372036854775807 and t.attempt < 2147483647
            order by t.serial_at, t.id
            limit 1001
        )
    ) other
    where other.id <> mine.id
    limit 1001
), lane (priority) as (
    select -32769 from mine where mine.serial is null
    union all
    select next_lane.priority::integer
    from lane
    cross join mine
    cross join lateral (
        (
            select t.priority from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null
              and t.queue = mine.queue and t.priority > lane.priority and t.priority <= mine.priority
            order by t.priority limit 1
        )
        union all
        (
            select t.priority from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = mine.needs_id
              and t.queue = mine.queue and t.priority > lane.priority and t.priority <= mine.priority
            order by t.priority limit 1
        )
        order by priority limit 1
    ) next_lane
), ahead as (
    select due.id
    from lane
    cross join lateral (
        select m.id, m.queue, m.needs_id, case when lane.priority < m.priority then 'infinity' else m.enqueued_at end as before from mine m
    ) mine
    cross join lateral (
        (
            select t.id from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null
              and t.queue = mine.queue and t.priority = lane.priority and t.enqueued_at <= statement_timestamp()
              and (t.enqueued_at, t.id) < (mine.before, mine.id)
            order by t.enqueued_at, t.id
            limit 1001
        )
        union all
        (
            select t.id from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = mine.needs_id
              and t.queue = mine.queue and t.priority = lane.priority and t.enqueued_at <= statement_timestamp()
              and (t.enqueued_at, t.id) < (mine.before, mine.id)
            order by t.enqueued_at, t.id
            limit 1001
        )
    ) due
    limit 1001
)
select
    (select count(*) from crew) as alive,
    (select count(*) from crew where serves) as serving,
    (select count(*) from crew where serves and knows) as knowing,
    (select able.slots::integer from able) as slots,
    (select able.running::integer from able) as running,
    (
        select max(greatest(s.last_beat_at, w.last_beat_at, w.started_at))
        from {schema}.supervisors s
        left join {schema}.workers w on w.supervisor_id = s.id
    ) as last_beat_at,
    (
        select max(least(greatest(s.last_beat_at, w.last_beat_at, w.started_at), w.ended_at))
        from {schema}.workers w
        join {schema}.supervisors s on s.id = w.supervisor_id
        where (w.queues is null or mine.queue = any(w.queues)) and coalesce({schema}.object_of(w.metadata) -> 'tasks' ? mine.name, true)
    ) as last_able_at,
    (select count(*) from ahead) as ahead,
    (select count(*) from line) as before,
    first.id as first_id, first.state as first_state, first.name as first_name, first.enqueued_at as first_due_at,
    (
        select count(*) from {schema}.tasks t
        where mine.suspect and t.suspect and t.state in ('CLAIMED', 'RUNNING')
    ) as alone,
    (
        select count(*) from crew
        where serves and knows and fits and (
            select x.loop_lag_ms from {schema}.worker_states x where x.worker_id = crew.id order by x.at desc limit 1
        ) > 1000
    ) as lagging,
    task_pause.kind, task_pause.name, task_pause.paused_at, task_pause.paused_by, task_pause.reason, task_pause.crashes,
    queue_pause.kind, queue_pause.name, queue_pause.paused_at, queue_pause.paused_by, queue_pause.reason, queue_pause.crashes,
    all_pause.kind, all_pause.name, all_pause.paused_at, all_pause.paused_by, all_pause.reason, all_pause.crashes,
    pg_is_in_recovery() as is_standby,
    (select count(*) from beating b where b.supervisor_id in (select x.id from lost x)) as lost,
    (select count(*) from crew where serves and knows and fits and quiet_since is not null) as quiet,
    (select max(quiet_since) from crew where serves and knows and fits) as quiet_since,
    (select count(*) from crew where serves and knows and fits) as fitting,
    (
        select json_agg(json_build_array(alike.parameters, alike.workers))::text
        from (select parameters, array_agg(id order by id) as workers from crew where serves and knows group by parameters) alike
    ) as registered
from mine
left join (select * from line l order by l.state = 'PENDING', l.serial_at, l.id limit 1) first on true
left join {schema}.pauses all_pause on all_pause.kind = 'all' and all_pause.name = '*'
left join {schema}.pauses task_pause on task_pause.kind = 'task' and task_pause.name = mine.name
    and (all_pause.call is null or task_pause.call is distinct from all_pause.call)
left join {schema}.pauses queue_pause on queue_pause.kind = 'queue' and queue_pause.name = mine.queue
