-- Supervisors that have not ended, but whose trees have no session left in PostgreSQL, judged as in watch_sessions. Each of them took its
-- session lock on this incarnation of the server. Now neither the lock nor any session of the tree's role exists. A supervisor has no row
-- if this cannot be known: on a standby, behind a transaction pooler, or if the server hides sessions. The same applies after a restart of
-- the server, until the lock is taken again.
create function {schema}.trees_without_session() returns table (id text) language sql stable as $$
    with here as materialized (
        select {schema}.server_incarnation() as incarnation
    ), connected as materialized (
        select a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree from pg_stat_activity a
    ), locks as materialized (
        select (l.classid::bigint << 32) | l.objid::bigint as key, c.role
        from pg_locks l
        join connected c on c.pid = l.pid
        where l.locktype = 'advisory' and l.granted and l.objsubid = 1
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
    )
    select s.id
    from {schema}.supervisors s, here h
    where s.ended_at is null and s.session_held and s.session_server = h.incarnation
      and not exists (select from locks l where l.key = s.lock_key and l.role = coalesce(s.session_role, l.role))
      and not exists (select from connected c where c.tree is null)
      and not exists (
          select from connected c where c.tree = s.session_name and c.role = coalesce(s.session_role, c.role)
      )
$$
