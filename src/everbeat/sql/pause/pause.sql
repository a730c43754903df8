-- Pauses a task function or a queue: it is not claimed until it is resumed. Paused twice, the first one stands.
with paused as (
    insert into {schema}.pauses (kind, name, paused_by, reason) values (%(kind)s, %(name)s, %(paused_by)s, %(reason)s)
    on conflict (kind, name) do nothing
    returning kind, name, paused_at, paused_by, reason, crashes
)
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, true as is_new from paused p
union all
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, false from {schema}.pauses p
where p.kind = %(kind)s and p.name = %(name)s and not exists (select from paused)
