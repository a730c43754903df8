-- How many permits of a gate can be taken now, by all numbers of its limit. Null: any number. The rate is checked with a tolerance of ten
-- microseconds, because the times are floating-point numbers. PostgreSQL inlines the function, because it contains no subquery; a call
-- would take 17 us. width_bucket counts the starts, in ascending order, that are before the window.
create function {schema}.limit_room(gate {schema}.gates, bound {schema}.limits, now double precision) returns integer language sql immutable as $$
    select case when gate.closed_until > now then 0 when bound.concurrency is null and bound.starts is null then null else least(1000000, greatest(0, least(
        bound.concurrency::bigint - gate.held,
        case when bound.starts is not null and not bound.sliding then
            floor(least(1000000, greatest(-1,
                (now + (bound.burst - 1) * (bound.period_s / bound.starts) - greatest(gate.next_at, now)) / (bound.period_s / bound.starts) + 1e-5
            )))::bigint + 1
        end,
        case when bound.sliding then
            bound.starts - coalesce(cardinality(gate.recent) - width_bucket(now - bound.period_s, gate.recent), 0)
        end
    ))) end::integer
$$
