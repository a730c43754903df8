-- Delete samples of the future, and sums and peaks of spans that have not ended, or not long enough ago. They exist only if the clock was set back
-- after they were stored. Charts would read them in place of the rates and samples of the present. All counts remain
-- in `rates`, and are summed when their time comes. `rate_settled_s` and `peak_settled_s` are those of series/sum_rates
-- and series/add_peaks. The primary keys and depths_by_time serve the statement.
with level as materialized (
    select l.seconds, (l.seconds + l.rate_settled_s) * interval '1 second' as rates_after, (l.seconds + l.peak_settled_s) * interval '1 second' as peaks_after
    from unnest(%(levels)s::integer[], %(rate_settled_s)s::integer[], %(peak_settled_s)s::integer[]) l (seconds, rate_settled_s, peak_settled_s)
), gone_sums as (
    delete from {schema}.rate_sums s
    where s.ctid = any(array(
        select early.place
        from level l
        cross join (values (false), (true)) kind (is_total)
        cross join lateral (
            select x.ctid as place from {schema}.rate_sums x
            where x.seconds = l.seconds and x.is_total = kind.is_total and x.at > statement_timestamp() - l.rates_after
            for update skip locked
        ) early
    ))
), gone_peaks as (
    delete from {schema}.depth_peaks p
    where p.ctid = any(array(
        select early.place
        from level l
        cross join (values (false), (true)) kind (is_total)
        cross join lateral (
            select x.ctid as place from {schema}.depth_peaks x
            where x.seconds = l.seconds and x.is_total = kind.is_total and x.at > statement_timestamp() - l.peaks_after
            for update skip locked
        ) early
    ))
)
delete from {schema}.depths d
where d.ctid = any(array(
    select x.ctid from {schema}.depths x where x.seconds in (10, 60, 3600) and x.at > statement_timestamp() for update skip locked
))
