-- List recent final failures by name, code and class, most frequent first. The statement reads a limited number of tasks through an index,
-- newest first. An escaped NUL or surrogate that was stored by hand cannot be read as text.
with recent as materialized (
    select t.name, t.failed_at, case when t.error::text !~* E'\\\\u(0000|d[89a-f])' then t.error end as error
    from {schema}.all_tasks t
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
