-- When a gate has room for this many permits by itself, or null if it needs the release of a permit. The time can be in the past.
create function {schema}.gate_opens_at(gate {schema}.gates, bound {schema}.limits, cost integer)
returns timestamptz language sql immutable as $$
    select case when bound.concurrency is null or gate.held::bigint + cost <= bound.concurrency then to_timestamp(nullif(nullif(greatest(
        gate.closed_until,
        case when bound.starts is not null and not bound.sliding then gate.next_at - (bound.burst - cost) * (bound.period_s / bound.starts) end,
        case when bound.sliding then gate.recent[cardinality(gate.recent) - bound.starts + cost] + bound.period_s end
    ), 0), 'NaN')) end
$$
