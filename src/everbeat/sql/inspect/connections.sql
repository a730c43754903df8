-- How many connections of clients there are, how many may be, and how many of them are everbeat's. Of strangers' sessions a role
-- without pg_monitor sees no more than that they are there.
select
    count(*) filter (where a.backend_type = 'client backend' or (a.backend_type is null and a.usesysid is not null)) as used,
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer as most,
    count(*) filter (where a.application_name like 'everbeat%%') as ours
from pg_stat_activity a
