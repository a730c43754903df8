-- List transactions that have been open too long and prevent the removal of dead rows, oldest first. At least one row is returned: its last
-- column shows whether there are transactions whose age this role cannot see.
select found.pid, found.who, found.age_s, hidden.hides
from (
    select exists (
        select from pg_stat_activity a
        where a.usesysid is not null and a.state is null and (a.backend_xmin is not null or a.backend_xid is not null)
    ) as hides
) hidden
left join (
    select
        a.pid, concat_ws(' ', nullif(a.application_name, ''), 'of', a.usename, '(' || a.state || ')') as who,
        extract(epoch from statement_timestamp() - a.xact_start)::float8 as age_s
    from pg_stat_activity a
    where a.pid <> pg_backend_pid() and a.backend_type = 'client backend' and (a.backend_xmin is not null or a.backend_xid is not null)
    union all
    select null, 'prepared transaction ' || p.gid, extract(epoch from statement_timestamp() - p.prepared)::float8
    from pg_prepared_xacts p
    where p.database = current_database()
) found on found.age_s * 1000 > %(older_than_ms)s
order by found.age_s desc
limit 5
