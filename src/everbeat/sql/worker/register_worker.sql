-- Register a worker that was started by a supervisor. Return no row if the supervisor was ended. The statement is idempotent.
insert into {schema}.workers (id, supervisor_id, hostname, pid, process_started, queues, metadata)
select %(id)s, s.id, %(hostname)s, %(pid)s, %(process_started)s, %(queues)s::text[], %(metadata)s::json
from {schema}.supervisors s
where s.id = %(supervisor_id)s and s.ended_at is null
on conflict (id) do update set supervisor_id = excluded.supervisor_id
returning id
