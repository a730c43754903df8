-- How many connections of clients there are, how many may be, and how many of them are everbeat's. Of strangers' sessions a role
-- without pg_monitor sees no more than that they are there. Any role may bear any application_name: only sessions of a role with which a
-- tree of this schema registered, or with which this one logged in, are everbeat's.
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
