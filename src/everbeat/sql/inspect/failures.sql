-- Recent final failures by name, code and class, the most frequent first. Reads at most so many tasks by their index, the newest first.
-- A NUL that was stored by hand cannot be read as text.
with recent as materialized (
    select t.name, t.failed_at, case when position('\u0000' in t.error::text) = 0 then t.error end as error
    from {schema}.tasks t
    where t.state = 'FAILED' and t.failed_at > statement_timestamp() - %(within_ms)s * interval '1 millisecond'
      and t.failed_at <= statement_timestamp()
    order by t.failed_at desc
    limit %(most)s
)
select
    left(r.name, 200), left(coalesce(r.error ->> 'code', ''), 200), left(coalesce(r.error ->> 'type', ''), 200), count(*),
    extract(epoch from statement_timestamp() - min(r.failed_at))::float8
from recent r
group by 1, 2, 3
order by 4 desc, 1, 2, 3
