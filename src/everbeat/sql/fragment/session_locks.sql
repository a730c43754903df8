-- The session locks held in this database, and the server's incarnation. The CTE `connected` supplies the server's sessions. Their roles are
-- looked up in a JSON object. Sessions of everbeat use no hash joins, and nested loops would compare each lock with each session.
roles as materialized (
    select jsonb_object_agg(c.pid, c.role) as by_pid from connected c
), locks as materialized (
    select (l.classid::bigint << 32) | l.objid::bigint as key, (r.by_pid ->> l.pid::text)::oid as role
    from pg_locks l
    cross join roles r
    where jsonb_exists(r.by_pid, l.pid::text) and l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
), here as materialized (
    select {schema}.server_incarnation() as incarnation
)
