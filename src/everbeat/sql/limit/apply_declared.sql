-- Store the limits that live workers declare. Of all declarations of a name, the one that became live last counts. Numbers that an operator
-- has set stay in force, and the declaration takes effect after them. A limit that no live worker declares any longer is deleted. It stays
-- while an operator has set it, a task waits for it or a task holds its permits. Return the names of changed and deleted limits, and those
-- (TAKEN) that another owner declares, with the owner whose declaration does not count.
with live as materialized (
    select v.owner, v.version, v.limits, v.live_since
    from {schema}.schedule_versions v
    where exists (
        select from {schema}.workers w where w.schedule_owner = v.owner and w.schedule_version = v.version and w.ended_at is null
    )
), declared as materialized (
    select v.owner, v.live_since, v.version, g.*
    from live v
    cross join lateral json_array_elements(case when json_typeof(v.limits) = 'array' then v.limits else '[]' end) as one (definition)
    cross join lateral json_to_record(
        case when json_typeof(one.definition) = 'object' then one.definition else '{{}}' end
    ) as g ({fragment/limit_fields})
    where g.name is not null
), winner as materialized (
    -- An owner's older versions count only for limits that its newest version omits, until their workers have ended.
    select distinct on (d.name) d.*,
        json_build_object('concurrency', d.concurrency, 'starts', d.starts, 'period_s', d.period_s, 'burst', d.burst, 'key', d.key) as numbers
    from declared d
    order by d.name, d.live_since desc, d.version desc
), changed as (
    insert into {schema}.limits as l (
        name, concurrency, starts, period_s, burst, sliding, fair, weights, when_full, declared, declared_by, declared_at
    )
    select
        w.name, w.concurrency, w.starts, w.period_s, w.burst, w.sliding, w.fair, w.weights, w.when_full, w.numbers, w.owner, statement_timestamp()
    from winner w
    order by w.name
    on conflict (name) do update set
        concurrency = case when l.set_by is null then excluded.concurrency else l.concurrency end,
        starts = case when l.set_by is null then excluded.starts else l.starts end,
        period_s = case when l.set_by is null then excluded.period_s else l.period_s end,
        burst = case when l.set_by is null then excluded.burst else l.burst end,
        sliding = excluded.sliding, fair = excluded.fair, weights = excluded.weights, when_full = excluded.when_full,
        declared = excluded.declared, declared_by = excluded.declared_by, declared_at = excluded.declared_at
    where (l.declared::text, l.declared_by, l.sliding, l.fair, l.weights::text, l.when_full) is distinct from (
        excluded.declared::text, excluded.declared_by, excluded.sliding, excluded.fair, excluded.weights::text, excluded.when_full
    )
    returning l.name
), deleted as (
    delete from {schema}.limits l
    where l.declared_by is not null and l.set_by is null and not exists (select from winner w where w.name = l.name)
      and exists (select from live v where v.owner = l.declared_by)
      and not exists (select from {schema}.gates g where g.limit_name = l.name and g.held > 0)
      and not exists (select from {schema}.line_changes c where c.line is not null)
      and not exists (
          select from {schema}.lines x
          where x.gates is not null and x.state <> 'I' and exists (select from unnest(x.gates) u where split_part(u, '/', 1) = l.name)
      )
    returning l.name
), hint as materialized (
    select pg_notify(%(channel)s, '*') where exists (select from changed) and (select pg_notification_queue_usage()) < 0.5
)
select c.name, 'STORED' as verdict, null as owner from changed c
union all
select d.name, 'DELETED', null from deleted d
union all
select distinct d.name, 'TAKEN', d.owner
from declared d
join winner w on w.name = d.name and w.owner <> d.owner
where (d.concurrency, d.starts, d.period_s, d.burst, d.sliding, d.fair, d.weights::text, d.when_full, d.key) is distinct from (
    w.concurrency, w.starts, w.period_s, w.burst, w.sliding, w.fair, w.weights::text, w.when_full, w.key
)
union all
select null, 'NOTIFIED', null from hint
order by 1
