-- Pause a schedule: no tick is decided until it is resumed, or until resume_at. An earlier pause stays as it is.
with held as materialized (
    select s.name, s.owner from {schema}.schedules s where s.name = %(name)s for no key update
), paused as (
    update {schema}.schedules s
    set paused_at = statement_timestamp(), paused_by = %(paused_by)s, pause_reason = %(reason)s, resume_at = %(resume_at)s,
        next_at = case when s.ended_at is null and s.retired_at is null then %(resume_at)s::timestamptz end,
        changed_at = greatest(statement_timestamp(), s.changed_at + interval '1 microsecond')
    from held h where s.name = h.name and s.paused_at is null
    returning s.name
)
select case when p.name is null then 'unchanged' else 'changed' end as verdict, h.owner from held h left join paused p on true
