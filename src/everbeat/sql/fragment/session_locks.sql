-- The session locks held in this database, and the server's incarnation. The CTE `connected` supplies the server's sessions.
locks as materialized (
    select (l.classid::bigint << 32) | l.objid::bigint as key, c.role
    from pg_locks l
    join connected c on c.pid = l.pid
    where l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
), here as materialized (
    select {schema}.server_incarnation() as incarnation
)
