-- List the queues whose attempts started most often between two times, with their counts, at most `limit` of them. Only of these queues, the
-- histograms are added up. The primary key of `rates` serves the statement, except that a range of days reads most of the table.
with busy as materialized (
    select r.queue, sum(r.started) as started
    from {schema}.rates r
    where r.seconds in (60, 3600) and r.at >= %(since)s and r.at < %(until)s
    group by r.queue
    order by started desc, r.queue
    limit %(limit)s
)
select %(since)s::timestamptz as at, r.queue, null::text as name, {fragment/summed_rates}
from {schema}.rates r
where r.seconds in (60, 3600) and r.at >= %(since)s and r.at < %(until)s and r.queue = any(array(select b.queue from busy b))
group by r.queue
order by started desc, r.queue
