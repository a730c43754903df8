-- Register a worker that was started by a supervisor. Return no row if the supervisor was ended. The statement is idempotent. It also stores
-- the schedules that the worker's code declares. If no other live worker declares this version of them, the version becomes live now, unless
-- the worker only replaces another one (starts_version is false).
with declared as (
    insert into {schema}.schedule_versions as v (owner, version, schedules, live_since)
    select %(schedule_owner)s, %(schedule_version)s, %(schedules)s::text::json, statement_timestamp()
    from {schema}.supervisors s
    where s.id = %(supervisor_id)s and s.ended_at is null and %(schedule_owner)s::text is not null
    on conflict (owner, version) do update set live_since = excluded.live_since
    where %(starts_version)s and not exists (
        select from {schema}.workers w where w.schedule_owner = excluded.owner and w.schedule_version = excluded.version and w.ended_at is null
    )
    returning 1
)
insert into {schema}.workers (id, supervisor_id, hostname, pid, process_started, queues, metadata, schedule_owner, schedule_version)
select
    %(id)s, s.id, %(hostname)s, %(pid)s, %(process_started)s, %(queues)s::text[], %(metadata)s::json, %(schedule_owner)s, %(schedule_version)s
from {schema}.supervisors s
where s.id = %(supervisor_id)s and s.ended_at is null
on conflict (id) do update set supervisor_id = excluded.supervisor_id
returning id
