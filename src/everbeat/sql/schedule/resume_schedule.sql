-- Resume a paused schedule. The next pass records its ticks until now as missed.
with held as materialized (
    select s.name, s.owner from {schema}.schedules s where s.name = %(name)s for no key update
), resumed as (
    update {schema}.schedules s
    set paused_at = null, paused_by = null, pause_reason = null, resume_at = null,
        held_until = greatest(s.held_until, statement_timestamp()), held_because = 'PAUSED',
        next_at = case when s.ended_at is null and s.retired_at is null then statement_timestamp() end,
        changed_at = greatest(statement_timestamp(), s.changed_at + interval '1 microsecond')
    from held h where s.name = h.name and s.paused_at is not null
    returning s.name
)
select case when r.name is null then 'unchanged' else 'changed' end as verdict, h.owner from held h left join resumed r on true
