-- List the largest sizes of the tables, and the age of the oldest transaction, in each span of `bucket_s` seconds.
-- depths_by_time serves the statement.
select
    date_bin(%(bucket_s)s * interval '1 second', d.at, timestamptz '2000-01-01 00:00+00') as bucket, max(d.table_bytes) as table_bytes,
    max(d.dead_rows) as dead_rows, max(d.oldest_transaction_s) as oldest_transaction_s
from {schema}.depths d
where d.seconds in (60, 3600) and d.at >= %(since)s and d.at < %(until)s and d.queue is null
group by 1
order by bucket
