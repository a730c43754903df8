-- Delete a schedule that was made at run time, or that is retired. Its runs and its decided ticks stay.
with held as materialized (
    select s.name, s.owner from {schema}.schedules s where s.name = %(name)s for update
), gone as (
    delete from {schema}.schedules s using held h where s.name = h.name and (s.owner is null or s.retired_at is not null) returning s.name
)
select case when g.name is null then 'declared' else 'changed' end as verdict, h.owner from held h left join gone g on true
