-- Take the session lock of a supervisor on this connection and record it; return null if the supervisor has ended in the meantime. The
-- record contains the server's incarnation and the role. On another server, the lock proves nothing, and sessions of other roles do not
-- belong to the tree.
with locked as materialized (
    select pg_try_advisory_lock(%(lock_key)s) as got
)
update {schema}.supervisors s
set session_at = statement_timestamp(), session_held = l.got,
    session_server = {schema}.server_incarnation(),
    session_role = (select a.usesysid from pg_stat_get_activity(pg_backend_pid()) a)
from locked l
where s.id = %(id)s and s.ended_at is null
returning l.got
