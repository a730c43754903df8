-- Count the client connections, the connections that the server allows, and everbeat's connections. Without pg_monitor, a role sees no
-- details of other roles' sessions. Any role can use any application_name. So only sessions of certain roles count as everbeat's: this
-- session's login role, and the roles with which trees of this schema registered.
with own as materialized (
    select s.session_role as role from {schema}.supervisors s where s.ended_at is null
    union
    select a.usesysid from pg_stat_get_activity(pg_backend_pid()) a
)
select
    count(*) filter (where a.backend_type = 'client backend' or (a.backend_type is null and a.usesysid is not null)) as used,
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer as most,
    count(*) filter (where a.application_name like 'everbeat%%' and a.usesysid in (select own.role from own)) as ours
from pg_stat_activity a
