-- Claim due tasks for one worker, in the order of service: PENDING -> RUNNING for the first `starts` tasks, PENDING -> CLAIMED for the
-- rest. Each task gets the next fence and a new claim_id. docs/claim.md explains each part and shows its plan.
-- A repeated call (with the same claim_call) returns the tasks that the first call claimed. An ended worker gets no tasks. Tasks with
-- paused names or in paused queues are not claimed. The claim_id is a digest of claim_call (which is random), the task's id and its fence.
-- Generating a random number for each task took a fifth of the claim's time.
-- A lane is a (queue, priority). The floor of a lane is the position up to which this worker has claimed. The claim reads nothing before a
-- floor, because the index keeps the entries of claimed tasks there while any transaction has an old snapshot.
-- Tasks of lines (with a serial key or limits) come from offer_lines, which takes their permits. The permits of those that this claim does
-- not take are returned at once, and their lines are noted as changed. `line_floors` is what an earlier claim returned. Lanes of equal
-- priority take turns. The tasks in lines and the others of a lane take turns, too. `after_queue` is the queue of the worker's latest task.
-- A worker that is busy with other tasks usually leaves out the part "lines", which takes a tenth of a claim's time. Such a claim finds
-- no tasks of lines.
-- Marked tasks (needs_id) are claimed only from the groups in `marked`, which this worker's code understands. Each group is a lane without
-- a floor. If there are no groups, the lines between "[marked" and "marked]" are left out, because they take a tenth of a claim's time.
-- The claim stops before the total size of arguments and checkpoints exceeds `most_bytes`, because a larger reply might never arrive. The
-- first task is always claimed. Stored sizes are compared first, because they need no decompression; 255 is the largest compression ratio.
-- A row whose counters have no next value is skipped, because the overflow would abort every claim. `everbeat doctor` names the row.
-- If the search took longer than 50 ms, each row contains the search's duration, without the time spent in the network and in the worker.
with recursive caller as materialized (
    select id from {schema}.workers where id = %(worker_id)s and ended_at is null for key share
), again as materialized (
    select t.id from {schema}.tasks t
    where t.claimed_by_worker_id = %(worker_id)s and t.state in ('CLAIMED', 'RUNNING') and t.claim_call = %(claim_call)s
), asked as materialized (
    select
        array(
            select unnest(%(names)s::text[]) where not exists (select from {schema}.pauses p where p.kind = 'all')
            except select p.name from {schema}.pauses p where p.kind = 'task'
        ) as names,
        array(select p.name from {schema}.pauses p where p.kind = 'queue') as closed
-- [marked
), marked as materialized (
    select m.needs_id, m.queue, m.priority
    from json_to_recordset(%(marked)s::json) as m (needs_id uuid, name text, queue text, priority smallint)
    cross join asked
    where m.name = any(asked.names)
-- marked]
), floor as materialized (
    select f.queue, f.priority, f.at, f.id
    from unnest(
        %(floor_queues)s::text[], %(floor_priorities)s::smallint[], %(floor_ats)s::timestamptz[], %(floor_ids)s::uuid[]
    ) as f (queue, priority, at, id)
), lane (queue, priority, at, id, first_at) as (
    select coalesce(q.name, ''), -32769, '-infinity'::timestamptz, '00000000-0000-0000-0000-000000000000'::uuid, null::timestamptz
    from (select null::text where %(queues)s::text[] is null union all select distinct unnest(%(queues)s::text[])) q (name)
    union all
    select next_lane.queue, next_lane.priority::integer, next_lane.at, next_lane.id, next_lane.first_at
    from lane
    left join lateral (
        select f.* from floor f
        where (f.queue, f.priority) > (lane.queue, lane.priority) and (%(queues)s::text[] is null or f.queue = lane.queue)
        order by f.queue, f.priority limit 1
    ) known on true
    cross join lateral (
        select found.*
        from (
            select known.queue, known.priority, known.at, known.id, null::timestamptz as first_at where known.queue is not null
            union all
            (
                select t.queue, t.priority, '-infinity', '00000000-0000-0000-0000-000000000000', t.enqueued_at from {schema}.tasks t
                where known.queue is not null and t.state = 'PENDING' and t.serial is null and t.needs_id is null
                  and (t.queue, t.priority) > (lane.queue, lane.priority) and (t.queue, t.priority) < (known.queue, known.priority)
                order by t.queue, t.priority, t.enqueued_at limit 1
            )
            union all
            (
                select t.queue, t.priority, '-infinity', '00000000-0000-0000-0000-000000000000', t.enqueued_at from {schema}.tasks t
                where known.queue is null and %(queues)s::text[] is null and t.state = 'PENDING' and t.serial is null and t.needs_id is null
                  and (t.queue, t.priority) > (lane.queue, lane.priority)
                order by t.queue, t.priority, t.enqueued_at limit 1
            )
            union all
            (
                select t.queue, t.priority, '-infinity', '00000000-0000-0000-0000-000000000000', t.enqueued_at from {schema}.tasks t
                where known.queue is null and %(queues)s::text[] is not null and t.state = 'PENDING' and t.serial is null and t.needs_id is null
                  and t.queue = lane.queue and t.priority > lane.priority
                order by t.priority, t.enqueued_at limit 1
            )
        ) found
        order by found.queue, found.priority limit 1
    ) next_lane
-- [lines
), offered as materialized (
    select o.*
    from asked
    cross join lateral {schema}.offer_lines(
        asked.names
        -- [marked
        || array(select distinct m.needs_id::text from marked m)
        -- marked]
        , %(queues)s::text[], asked.closed, %(queue_names)s::text[], %(queue_priorities)s::integer[], %(suspects)s::boolean, %(limit)s,
        %(starts)s, %(channel)s, %(line_floors)s::json
    ) o
    where exists (select from caller) and not exists (select from again)
      -- The call of the function alone takes longer than this look.
      and (%(line_floors)s::json is not null or exists (select from {schema}.lines l where l.state = 'R'))
-- lines]
), ready as materialized (
    select found.*, coalesce(q.priority, 100) as queue_priority,
        count(*) over (partition by coalesce(q.priority, 100), found.priority) as lanes
    from (
        select lane.queue, lane.priority::smallint, lane.first_at as enqueued_at, false as is_line, lane.at, lane.id, null::uuid as needs_id
        from lane
        where lane.first_at <= statement_timestamp()
        union all
        select lane.queue, lane.priority, first.enqueued_at, false, lane.at, lane.id, null
        from lane
        cross join lateral (
            select t.enqueued_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = lane.queue and t.priority = lane.priority
              and (t.enqueued_at, t.id) > (lane.at, lane.id) and t.enqueued_at <= statement_timestamp()
            order by t.enqueued_at, t.id limit 1
        ) first
        where lane.first_at is null and lane.at > '-infinity'
        -- [marked
        union all
        select m.queue, m.priority, first.enqueued_at, false, null, null, m.needs_id
        from marked m
        cross join lateral (
            select t.enqueued_at from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = m.needs_id and t.queue = m.queue and t.priority = m.priority
              and t.enqueued_at <= statement_timestamp()
            order by t.enqueued_at, t.id limit 1
        ) first
        -- marked]
        -- [lines
        union all
        select o.queue, o.priority, min(o.enqueued_at), true, null, null, null from offered o group by o.queue, o.priority
        -- lines]
    ) found
    cross join asked
    left join unnest(%(queue_names)s::text[], %(queue_priorities)s::integer[]) as q (name, priority) on q.name = found.queue
    where (%(queues)s::text[] is null or found.queue = any(%(queues)s::text[])) and found.queue <> all(asked.closed)
), urgent as (
    select array_agg(distinct r.queue) as queues
    from ready r
    where r.lanes > 64 and (r.queue_priority, r.priority) = (select f.queue_priority, f.priority from ready f order by f.queue_priority, f.priority limit 1)
), picked as materialized (
    select due.id, due.args, due.checkpoint, due.is_gated, due.granted_at
    from (
        -- Lanes of equal priority take turns: each takes its share first, and then what the others leave.
        select r.*, again_with.part, case again_with.part when 1 then (%(limit)s + r.lanes - 1) / r.lanes else %(limit)s end as share,
            case again_with.part when 1 then 0 else (%(limit)s + r.lanes - 1) / r.lanes end as passed
        from ready r
        cross join (values (1), (2)) as again_with (part)
        where again_with.part = 1 or r.lanes > 1
        order by r.queue_priority, r.priority, again_with.part, r.queue <= %(after_queue)s::text, case when %(after_queue)s::text is not null then r.queue end,
            r.enqueued_at
    ) r
    cross join asked
    cross join lateral (
        select * from (
            select t.id, t.args, t.checkpoint, false as is_gated, null::timestamptz as granted_at from {schema}.tasks t
            where not r.is_line and r.needs_id is null and t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = r.queue and t.priority = r.priority
              and (t.enqueued_at, t.id) > (r.at, r.id) and t.enqueued_at <= statement_timestamp() and t.name = any(asked.names)
              and (%(suspects)s::boolean is null or t.suspect = %(suspects)s::boolean)
              and (t.good_until is null or t.good_until > statement_timestamp())
              and t.fence < 9223372036854775807 and t.attempt < 2147483647
            order by t.enqueued_at, t.id
            limit r.share offset r.passed
            for no key update skip locked
        ) of_lane
        -- [marked
        union all
        select * from (
            select t.id, t.args, t.checkpoint, false, null::timestamptz from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = r.needs_id and t.queue = r.queue and t.priority = r.priority
              and t.enqueued_at <= statement_timestamp() and t.name = any(asked.names)
              and (%(suspects)s::boolean is null or t.suspect = %(suspects)s::boolean)
              and (t.good_until is null or t.good_until > statement_timestamp())
              and t.fence < 9223372036854775807 and t.attempt < 2147483647
            order by t.enqueued_at, t.id
            limit r.share offset r.passed
            for no key update skip locked
        ) of_group
        -- marked]
        -- [lines
        union all
        select * from (
            select t.id, t.args, t.checkpoint, o.gates is not null, o.granted_at
            from (select * from offered o where o.queue = r.queue and o.priority = r.priority order by o.place) o
            cross join lateral (
                -- The row might have changed since it was offered. The lock returns its newest version, which is compared again.
                select t.id, t.args, t.checkpoint from {schema}.tasks t
                where t.id = o.id and t.state = 'PENDING' and t.serial = o.line
                  and t.gates is not distinct from o.gates and t.costs is not distinct from o.costs
                  and t.enqueued_at <= statement_timestamp() and t.name = any(asked.names)
                  and (%(suspects)s::boolean is null or t.suspect = %(suspects)s::boolean)
                  and (t.good_until is null or t.good_until > o.granted_at)
                limit 1
                for no key update skip locked
            ) t
            where r.is_line
            limit r.share offset r.passed
        ) of_lines
        -- lines]
    ) due
    where exists (select from caller) and not exists (select from again)
    limit %(limit)s
), light as materialized (
    select sum(pg_column_size(p.args) + coalesce(pg_column_size(p.checkpoint), 0)) * 255 <= %(most_bytes)s as is_light, count(*) as rows,
        count(*) filter (where p.is_gated) as gated
    from picked p
), placed as (
    select p.*, row_number() over so_far as place,
        sum(pg_column_size(p.args) + coalesce(pg_column_size(p.checkpoint), 0)) over so_far as stored
    from picked p
    where not (select is_light from light)
    window so_far as (rows unbounded preceding)
), measured as (
    select p.id, p.is_gated, p.granted_at, p.place, sum(octet_length(p.args::text) + coalesce(octet_length(p.checkpoint::text), 0)) over (rows unbounded preceding) as size
    from placed p
    where p.place = 1 or p.stored <= %(most_bytes)s
), fitting as (
    select p.id, p.is_gated, p.granted_at from picked p where (select is_light from light)
    union all
    select m.id, m.is_gated, m.granted_at from measured m where m.place = 1 or m.size <= %(most_bytes)s
), numbered as materialized (
    select f.id, coalesce(f.granted_at, statement_timestamp()) as at,
        f.is_gated or (count(*) filter (where not f.is_gated) over (rows unbounded preceding)) <= %(starts)s - (select gated from light) as begins
    from fitting f
), taken as (
    update {schema}.tasks t
    set state = case when p.begins then 'RUNNING' else 'CLAIMED' end,
        claim_id = encode(substr(sha256(uuid_send(%(claim_call)s) || uuid_send(t.id) || int8send(t.fence)), 17), 'hex')::uuid,
        claim_call = %(claim_call)s, fence = t.fence + 1,
        claimed_at = p.at, claimed_by_worker_id = %(worker_id)s, progress = null, progress_at = null,
        started_at = case when p.begins then p.at end,
        attempt = t.attempt + p.begins::integer,
        policy = case when p.begins and t.policy is null then %(policies)s::json -> t.name else t.policy end,
        checkpoint_number = case when p.begins then 0 else t.checkpoint_number end,
        alone = p.begins and %(alone)s,
        permit = case when t.gates is not null then %(claim_call)s::uuid end
    from numbered p
    where t.id = p.id
    returning t.id, t.claim_id, t.fence, t.name, t.queue, t.priority, t.args::text, t.attempt, t.retry_count, t.crash_count, t.loss_count,
        t.policy::text, t.enqueued_at, t.good_until, t.suspect, t.checkpoint::text, t.started_at, t.serial is not null, coalesce(t.workflow_id, t.batch_id),
        {schema}.is_marked(t.needs), t.tick, t.labels::text
        -- [context
        , json_build_object(
            'carrier', case when octet_length(t.context::text) <= 16384 then t.context end, 'sent_at', t.sent_at, 'key', left(coalesce(t.key, t.unique_key), 1000),
            'schedule', t.schedule, 'workflow_id', t.workflow_id, 'node', t.node, 'parent_id', t.parent_id, 'gates', t.gates
        )::text as context
        -- context]
-- [lines
), unused as (
    insert into {schema}.line_changes (line, gates, at)
    select o.line, case when o.gates is not null then {schema}.return_permits(o.gates, o.costs, count(*)::integer, o.granted_at) end,
        min(o.serial_at)
    from (select o.id from offered o except select t.id from taken t) left_over
    join offered o on o.id = left_over.id
    group by o.line, o.gates, o.costs, o.granted_at
-- lines]
)
select found.*
    -- [lines
    , (select {fragment/have_lines_changed}) as lines_changed
    -- lines]
from (
    select taken.*,
        (select took from (select extract(epoch from clock_timestamp() - statement_timestamp())::float8) look (took) where took > 0.05) as looked_s,
        (select true from light where rows > (select count(*) from numbered)) as is_cut,
        case when taken.id = (select n.id from numbered n limit 1) then (select urgent.queues from urgent) end as due_queues
        -- [lines
        , case when taken.id = (select n.id from numbered n limit 1) then (select o.floors::text from offered o limit 1) end as line_floors
        -- lines]
    from taken
    union all
    select t.id, t.claim_id, t.fence, t.name, t.queue, t.priority, t.args::text, t.attempt, t.retry_count, t.crash_count, t.loss_count,
        t.policy::text, t.enqueued_at, t.good_until, t.suspect, t.checkpoint::text, t.started_at, t.serial is not null, coalesce(t.workflow_id, t.batch_id),
        {schema}.is_marked(t.needs), t.tick, t.labels::text
        -- [context
        , json_build_object(
            'carrier', case when octet_length(t.context::text) <= 16384 then t.context end, 'sent_at', t.sent_at, 'key', left(coalesce(t.key, t.unique_key), 1000),
            'schedule', t.schedule, 'workflow_id', t.workflow_id, 'node', t.node, 'parent_id', t.parent_id, 'gates', t.gates
        )::text as context
        -- context]
        , null, null, null
        -- [lines
        , null
        -- lines]
    from {schema}.tasks t join again a on a.id = t.id
) found
