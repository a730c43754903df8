-- Find overdue schedules, schedules that are paused because their runs failed, and the time zones of all schedules with further ticks. The
-- statement reads all schedules and is meant for the doctor.
(
    select 'overdue' as kind, s.name, s.next_at as at, s.timezone, s.timing::text as detail,
        least((extract(epoch from statement_timestamp()) - extract(epoch from s.next_at)) * 1000, 9e15)::bigint as overdue_ms
    from {schema}.schedules s
    where s.next_at < statement_timestamp() - %(overdue_ms)s * interval '1 millisecond'
    order by s.next_at
    limit %(limit)s
)
union all
(
    select 'failing', s.name, s.paused_at, null, s.pause_reason, null
    from {schema}.schedules s
    where s.paused_at is not null and s.paused_by = %(paused_by)s and s.ended_at is null and s.retired_at is null
    order by s.paused_at
    limit %(limit)s
)
union all
(select distinct 'zone', null, null::timestamptz, s.timezone, null, null::bigint from {schema}.schedules s where s.next_at is not null)
