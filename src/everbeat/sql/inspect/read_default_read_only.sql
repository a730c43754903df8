-- Return whether transactions on a primary are read-only by default for this role, where that default was set, and whether it affects
-- workers. The default affects workers if it was set for more than this role or session. The default also affects workers if a tree that
-- has not ended connects with this role.
select
    o.source,
    o.source not in ('client', 'session', 'user', 'database user') or o.source in ('user', 'database user') and exists (
        select from {schema}.supervisors s
        where s.ended_at is null and s.session_role = (select a.usesysid from pg_stat_get_activity(pg_backend_pid()) a)
    ) as for_workers
from pg_settings o
where o.name = 'default_transaction_read_only' and current_setting('default_transaction_read_only')::boolean
  and not pg_is_in_recovery()
