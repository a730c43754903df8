-- List the counts of each span of `bucket_s` seconds in the order of time, by queue and by name if wanted. Rows of supervisors and sums are added
-- up, because a roll-up moves counts and copies none. The primary key serves the statement.
select
    date_bin(%(bucket_s)s * interval '1 second', r.at, timestamptz '2000-01-01 00:00+00') as bucket,
    case when %(by_queue)s then r.queue end as of_queue, case when %(by_name)s then r.name end as of_name,
    {fragment/summed_rates}
from {schema}.rates r
where r.seconds in (60, 3600) and r.at >= %(since)s and r.at < %(until)s
  and (%(queue)s::text is null or r.queue = %(queue)s) and (%(name)s::text is null or r.name = %(name)s)
group by 1, 2, 3
order by bucket, of_queue, of_name
