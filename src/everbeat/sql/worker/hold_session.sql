-- Takes the session lock of a supervisor on this connection and says so; null when the supervisor was ended meanwhile.
with locked as materialized (
    select pg_try_advisory_lock(%(lock_key)s) as got
)
update {schema}.supervisors s
set session_at = statement_timestamp(), session_held = l.got
from locked l
where s.id = %(id)s and s.ended_at is null
returning l.got
