-- Pause a task function or a queue: workers do not claim its tasks until it is resumed. If it is already paused, the first pause remains.
-- The id of the call makes the statement idempotent. Return no row if another pause was committed while this statement was waiting, because
-- the statement's snapshot does not include that pause. A row that a pause of everything added for older code becomes an ordinary pause.
with paused as (
    insert into {schema}.pauses (kind, name, paused_by, reason, call)
    values (%(kind)s, %(name)s, %(paused_by)s, %(reason)s, %(call)s)
    on conflict (kind, name) do update
    set paused_at = statement_timestamp(), paused_by = excluded.paused_by, reason = excluded.reason, call = excluded.call
    where pauses.call is distinct from excluded.call
      and pauses.call = (select a.call from {schema}.pauses a where a.kind = 'all')
    returning kind, name, paused_at, paused_by, reason, crashes
)
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, false as already_paused from paused p
union all
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, p.call is distinct from %(call)s from {schema}.pauses p
where p.kind = %(kind)s and p.name = %(name)s and not exists (select from paused)
