-- Store a schedule that is made at run time, or replace one. A declared schedule stays as it is. An equal definition changes nothing, so the
-- statement can be repeated. A new schedule is due at once: the scheduler then computes its first tick.
with given as materialized (
    select g.* from json_to_record(%(schedule)s::text::json) as g ({fragment/schedule_fields})
), stored as (
    insert into {schema}.schedules as s ({fragment/schedule_columns}, owner, next_at)
    select {fragment/schedule_columns}, null, statement_timestamp() from given
    on conflict (name) do update set {fragment/schedule_replaced}
    where s.owner is null and s.declaration is distinct from excluded.declaration
    returning s.name
)
select
    case
        when st.name is not null and s.name is null then 'created'
        when st.name is not null then 'changed'
        when s.owner is not null then 'declared'
        else 'unchanged'
    end as verdict,
    s.owner
from given g
left join stored st on true
left join {schema}.schedules s on s.name = g.name
