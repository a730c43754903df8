-- Store the schedules that live workers declare, and retire the others. Of the versions of an owner that live workers declare, the version
-- that became live last counts. A schedule of the owner that this version omits is retired at once (UNDECLARED). If the owner has had no live
-- worker for after_ms, all its schedules are retired (NO_WORKER). A name belongs to the owner that has it, until that owner's schedule is
-- retired; a schedule that was made at run time keeps its name. Return the changes, and the names that were not available.
with winner as materialized (
    select distinct on (v.owner) v.owner, v.schedules
    from {schema}.schedule_versions v
    where exists (
        select from {schema}.workers w where w.schedule_owner = v.owner and w.schedule_version = v.version and w.ended_at is null
    )
    order by v.owner, v.live_since desc, v.version desc
), asked as materialized (
    select w.owner, g.*, s.name is null as is_new, s.owner as stored_owner, s.retired_at, s.declaration as stored_declaration, s.gates as stored_gates,
        s.labels as stored_labels,
        row_number() over (partition by g.name order by (s.owner = w.owner) is true desc, w.owner) = 1
            and (s.name is null or s.owner = w.owner or s.owner is not null and s.retired_at is not null) is true as is_granted
    from winner w
    cross join lateral json_array_elements(case when json_typeof(w.schedules) = 'array' then w.schedules else '[]' end) as one (definition)
    cross join lateral json_to_record(
        case when json_typeof(one.definition) = 'object' then one.definition else '{{}}' end
    ) as g ({fragment/schedule_fields})
    left join {schema}.schedules s on s.name = g.name
    where g.name is not null
), due as materialized (
    select a.* from asked a
    where a.is_granted and (
        a.is_new or a.retired_at is not null or a.stored_owner <> a.owner or a.stored_declaration is distinct from a.declaration
        or a.stored_gates is distinct from a.gates  -- an older version of everbeat stored the schedule
        or a.stored_labels is distinct from a.labels
    )
), stale as materialized (
    select s.name, s.owner, case when w.owner is null then 'NO_WORKER' else 'UNDECLARED' end as because
    from {schema}.schedules s
    left join winner w on w.owner = s.owner
    where s.owner is not null and not exists (select from asked a where a.name = s.name and a.is_granted)
      and (s.retired_at is null or s.retired_because = 'NO_WORKER' and w.owner is not null)
      and (w.owner is not null or not exists (
          select from {schema}.workers x
          where x.schedule_owner = s.owner
            and (x.ended_at is null or x.ended_at > statement_timestamp() - %(after_ms)s * interval '1 millisecond')
      ))
), held as materialized (
    select s.name from {schema}.schedules s
    where s.name = any(array(select d.name from due d union all select t.name from stale t))
    order by s.name
    for no key update
), stored as (
    insert into {schema}.schedules as s ({fragment/schedule_columns}, owner, next_at)
    select {fragment/schedule_columns}, d.owner, statement_timestamp() from due d
    where (select count(*) from held) >= 0
    order by d.name
    on conflict (name) do update set {fragment/schedule_replaced}
    where s.owner = excluded.owner or s.owner is not null and s.retired_at is not null
    returning s.name
), retired as (
    update {schema}.schedules s
    set retired_at = coalesce(s.retired_at, statement_timestamp()), retired_because = t.because, next_at = null,
        changed_at = greatest(statement_timestamp(), s.changed_at + interval '1 microsecond')
    from stale t
    join held h on h.name = t.name
    where s.name = t.name and s.owner = t.owner
    returning s.name, s.owner, t.because
)
select
    d.owner, d.name,
    case when d.is_new then 'ADDED' when d.retired_at is not null then 'RETURNED' else 'CHANGED' end as verdict, null as because
from due d join stored o on o.name = d.name
union all
select r.owner, r.name, 'RETIRED', r.because from retired r
union all
select a.owner, a.name, 'TAKEN', coalesce('the code of ' || a.stored_owner || ' declares it', 'it was made at run time')
from asked a where not a.is_granted
order by 1, 2
