-- A supervisor announces a worker that it started; repeatable. Nothing when the supervisor itself was ended.
insert into {schema}.workers (id, supervisor_id, hostname, pid, process_started, queues, metadata)
select %(id)s, s.id, %(hostname)s, %(pid)s, %(process_started)s, %(queues)s::text[], %(metadata)s::json
from {schema}.supervisors s
where s.id = %(supervisor_id)s and s.ended_at is null
on conflict (id) do update set supervisor_id = excluded.supervisor_id
returning id
