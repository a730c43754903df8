-- Register a worker that was started by a supervisor. Return no row if the supervisor was ended. The statement is idempotent. It also stores
-- the schedules that the worker's code declares. If no other live worker declares this version of them, the version becomes live now, unless
-- the worker only replaces another one (starts_version is false). Limits that do not exist yet are stored at once, so that the worker claims
-- no task before its limit exists.
with declared as (
    insert into {schema}.schedule_versions as v (owner, version, schedules, limits, live_since)
    select %(schedule_owner)s, %(schedule_version)s, %(schedules)s::text::json, %(limits)s::text::json, statement_timestamp()
    from {schema}.supervisors s
    where s.id = %(supervisor_id)s and s.ended_at is null and %(schedule_owner)s::text is not null
    on conflict (owner, version) do update set live_since = excluded.live_since
    where %(starts_version)s and not exists (
        select from {schema}.workers w where w.schedule_owner = excluded.owner and w.schedule_version = excluded.version and w.ended_at is null
    )
    returning 1
), limited as (
    insert into {schema}.limits (
        name, concurrency, starts, period_s, burst, sliding, fair, weights, when_full, declared, declared_by, declared_at
    )
    select
        g.name, g.concurrency, g.starts, g.period_s, g.burst, g.sliding, g.fair, g.weights, g.when_full,
        json_build_object('concurrency', g.concurrency, 'starts', g.starts, 'period_s', g.period_s, 'burst', g.burst, 'key', g.key),
        %(schedule_owner)s, statement_timestamp()
    from {schema}.supervisors s
    cross join json_to_recordset(coalesce(%(limits)s::text, '[]')::json) as g ({fragment/limit_fields})
    where s.id = %(supervisor_id)s and s.ended_at is null
    order by g.name
    on conflict do nothing
    returning 1
)
insert into {schema}.workers (id, supervisor_id, hostname, pid, process_started, queues, metadata, schedule_owner, schedule_version)
select
    %(id)s, s.id, %(hostname)s, %(pid)s, %(process_started)s, %(queues)s::text[], %(metadata)s::json, %(schedule_owner)s, %(schedule_version)s
from {schema}.supervisors s
where s.id = %(supervisor_id)s and s.ended_at is null
on conflict (id) do update set supervisor_id = excluded.supervisor_id
returning id
