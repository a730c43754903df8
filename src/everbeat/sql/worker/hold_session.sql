-- Takes the session lock of a supervisor on this connection and says so; null when the supervisor was ended meanwhile. Records on which
-- incarnation of the server that was, and the role: elsewhere the lock proves nothing, and sessions of other roles are not the tree's.
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
