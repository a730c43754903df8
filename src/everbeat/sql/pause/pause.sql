-- Pauses a task function or a queue: it is not claimed until it is resumed. Paused twice, the first one stands.
-- Repeatable by the id of the call. No row where another pause of it was committed while this one waited: this statement's snapshot does not show it.
with paused as (
    insert into {schema}.pauses (kind, name, paused_by, reason, call)
    values (%(kind)s, %(name)s, %(paused_by)s, %(reason)s, %(call)s)
    on conflict (kind, name) do nothing
    returning kind, name, paused_at, paused_by, reason, crashes
)
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, false as already_paused from paused p
union all
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, p.call is distinct from %(call)s from {schema}.pauses p
where p.kind = %(kind)s and p.name = %(name)s and not exists (select from paused)
