-- List the counts of the last sample by queue. The turn of the sampler has the time of that sample, also if it found no live task. So a
-- queue that has become empty has no row. The turn is null if no tree has sampled yet. depths_by_time serves the statement.
select
    turn.taken_at as sampled_at, d.queue, d.due, d.scheduled, d.suspended, d.claimed, d.running, d.oldest_due_s, d.at_least,
    extract(epoch from statement_timestamp() - turn.taken_at)::float8 as age_s
from {schema}.turns turn
left join {schema}.depths d on d.seconds in (10, 60, 3600) and d.at = turn.taken_at and d.queue is not null
where turn.service = %(service)s
order by d.queue
