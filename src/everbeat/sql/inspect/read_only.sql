-- Whether transactions are read-only by default for this role on a server that is no standby, where that was set, and whether it holds
-- for workers too: it was set for more than this role or session, or a tree that has not ended connects with this role.
select
    o.source,
    o.source not in ('client', 'session', 'user', 'database user') or o.source in ('user', 'database user') and exists (
        select from {schema}.supervisors s
        where s.ended_at is null and s.session_role = (select a.usesysid from pg_stat_get_activity(pg_backend_pid()) a)
    ) as for_workers
from pg_settings o
where o.name = 'default_transaction_read_only' and current_setting('default_transaction_read_only')::boolean
  and not pg_is_in_recovery()
