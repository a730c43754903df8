-- Add up rates. The rows of all supervisors for a minute that began more than ten minutes ago become one row. The minutes of an hour that
-- began more than 48 hours ago become one row. One statement deletes the rows and inserts their sums, so each count is in one row at any
-- moment. A sum that already exists grows. Rows that another session has locked wait for the next step. No supervisor writes the rows of
-- such a minute, because series/write_rates refuses them after five minutes. At most `most` rows of each kind are deleted. Return their
-- number. rates_by_supervisor and the primary key serve the statement.
with until as materialized (
    select
        date_bin('1 minute', statement_timestamp() - interval '10 minutes', timestamptz '2000-01-01 00:00+00') as minutes,
        date_bin('1 hour', statement_timestamp() - interval '48 hours', timestamptz '2000-01-01 00:00+00') as hours
), apart as materialized (
    select r.ctid as place from {schema}.rates r
    where r.supervisor <> '' and r.seconds = 60 and r.at < (select u.minutes from until u) and r.at >= (select u.hours from until u)
    order by r.at
    limit %(most)s
    for update skip locked
), aged as materialized (
    select r.ctid as place from {schema}.rates r
    where r.seconds = 60 and r.at < (select u.hours from until u)
    order by r.at
    limit %(most)s
    for update skip locked
), gone as (
    delete from {schema}.rates r
    where r.ctid = any(array(select a.place from apart a union all select a.place from aged a))
    returning
        case when r.at < (select u.hours from until u) then 3600 else 60 end as seconds,
        case when r.at < (select u.hours from until u) then date_bin('1 hour', r.at, timestamptz '2000-01-01 00:00+00') else r.at end as at,
        r.queue, r.name, r.started, r.completed, r.failed, r.retried, r.cancelled, r.suspended, r.released, r.crashed, r.lost, r.expired,
        r.wait_s, r.run_s, r.waits, r.runs
), summed as (
    insert into {schema}.rates as r (
        seconds, at, queue, name, supervisor, started, completed, failed, retried, cancelled, suspended, released, crashed, lost,
        expired, wait_s, run_s, waits, runs
    )
    select
        r.seconds, r.at, r.queue, r.name, '',
    {fragment/summed_rates}
    from gone r
    group by r.seconds, r.at, r.queue, r.name
    order by r.seconds, r.at, r.queue, r.name
    on conflict (seconds, at, queue, name, supervisor) do update
    set started = r.started + excluded.started, completed = r.completed + excluded.completed,
        failed = r.failed + excluded.failed, retried = r.retried + excluded.retried, cancelled = r.cancelled + excluded.cancelled,
        suspended = r.suspended + excluded.suspended, released = r.released + excluded.released,
        crashed = r.crashed + excluded.crashed, lost = r.lost + excluded.lost, expired = r.expired + excluded.expired,
        wait_s = r.wait_s + excluded.wait_s, run_s = r.run_s + excluded.run_s,
        waits = array(select a + b from unnest(r.waits, excluded.waits) with ordinality x (a, b, n) order by x.n),
        runs = array(select a + b from unnest(r.runs, excluded.runs) with ordinality x (a, b, n) order by x.n)
)
select count(*) as deleted from gone
