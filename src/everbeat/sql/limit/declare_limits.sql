-- Store the limits that do not exist yet, for a program that sends tasks of them. An existing limit stays as it is, so the statement can be
-- repeated. No worker has declared such a limit, so no worker's declaration removes it.
insert into {schema}.limits (name, concurrency, starts, period_s, burst, sliding, fair, weights, when_full, declared, declared_at)
select
    g.name, g.concurrency, g.starts, g.period_s, g.burst, g.sliding, g.fair, g.weights, g.when_full,
    json_build_object('concurrency', g.concurrency, 'starts', g.starts, 'period_s', g.period_s, 'burst', g.burst, 'key', g.key), statement_timestamp()
from json_to_recordset(%(limits)s::text::json) as g ({fragment/limit_fields})
order by g.name
on conflict do nothing
