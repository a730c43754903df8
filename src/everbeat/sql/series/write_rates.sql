-- Write the counts of a supervisor as absolute values by minute, queue and name. So a statement that is repeated after a lost reply changes
-- nothing, and a statement that arrives late never replaces larger counts. A minute that began more than five minutes ago is not written.
-- Its rows might be added up already, and a row written later would be added once more. A minute in the future is not
-- written, either. The server's clock decides. Return the server's time, and the numbers of accepted and of changed rows.
with given as materialized (
    select
        x.at, x.queue, x.name, x.started, x.completed, x.failed, x.retried, x.cancelled, x.suspended, x.released, x.crashed, x.lost, x.expired, x.wait_s,
        x.run_s, x.waits, x.runs
    from json_to_recordset(%(rows)s::json) as x (
        at timestamptz, queue text, name text, started bigint, completed bigint, failed bigint, retried bigint, cancelled bigint, suspended bigint,
        released bigint, crashed bigint, lost bigint, expired bigint, wait_s float8, run_s float8, waits bigint[],
        runs bigint[]
    )
    where x.at >= date_bin('1 minute', clock_timestamp(), timestamptz '2000-01-01 00:00+00') - interval '5 minutes'
      and x.at <= clock_timestamp() + interval '1 minute'
), written as (
    insert into {schema}.rates as r (
        seconds, at, queue, name, supervisor, started, completed, failed, retried, cancelled, suspended, released, crashed, lost,
        expired, wait_s, run_s, waits, runs
    )
    select
        60, x.at, x.queue, x.name, %(supervisor)s, x.started, x.completed, x.failed, x.retried, x.cancelled, x.suspended, x.released,
        x.crashed, x.lost, x.expired, x.wait_s, x.run_s, x.waits, x.runs
    from given x
    order by x.at, x.queue, x.name
    on conflict (seconds, at, queue, name, supervisor) do update
    set started = excluded.started, completed = excluded.completed, failed = excluded.failed, retried = excluded.retried,
        cancelled = excluded.cancelled, suspended = excluded.suspended, released = excluded.released, crashed = excluded.crashed,
        lost = excluded.lost, expired = excluded.expired, wait_s = excluded.wait_s, run_s = excluded.run_s, waits = excluded.waits,
        runs = excluded.runs
    where excluded.started + excluded.completed + excluded.failed + excluded.retried + excluded.cancelled
            + excluded.suspended + excluded.released + excluded.crashed + excluded.lost + excluded.expired
        > r.started + r.completed + r.failed + r.retried + r.cancelled + r.suspended + r.released + r.crashed + r.lost + r.expired
    returning 1
)
select statement_timestamp() as now, (select count(*) from given) as accepted, (select count(*) from written) as written
