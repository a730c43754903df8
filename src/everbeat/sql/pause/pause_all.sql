-- Pause everything: workers claim nothing until it is resumed. If everything is already paused, the first pause remains. The id of the call
-- makes the statement idempotent. Claims of older code do not know the kind 'all'. So each name that a live worker has registered is also
-- paused separately, with the same call. These rows are not listed, and end together with the pause. Return no row if another pause was
-- committed while this statement was waiting, as in pause/pause_name.
with paused as (
    insert into {schema}.pauses (kind, name, paused_by, reason, call)
    values ('all', '*', %(paused_by)s, %(reason)s, %(call)s)
    on conflict (kind, name) do nothing
    returning kind, name, paused_at, paused_by, reason, crashes
), also as (
    insert into {schema}.pauses (kind, name, paused_by, reason, call)
    select distinct 'task', task.name, %(paused_by)s, %(reason)s, %(call)s::uuid
    from {schema}.workers w
    cross join lateral (select {schema}.object_of(w.metadata) -> 'tasks' as names) told
    cross join lateral jsonb_array_elements_text(case when jsonb_typeof(told.names) = 'array' then told.names end) as task (name)
    where w.ended_at is null and exists (select from paused)
    order by task.name
    on conflict (kind, name) do nothing
)
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, false as already_paused from paused p
union all
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes, p.call is distinct from %(call)s from {schema}.pauses p
where p.kind = 'all' and not exists (select from paused)
