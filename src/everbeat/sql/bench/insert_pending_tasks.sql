-- Insert tasks into one queue that become due tomorrow.
insert into {schema}.tasks (id, name, queue, args, sent_at, enqueued_at)
select gen_random_uuid(), 'bench_filler', 'default', '{{"number": 1}}', statement_timestamp(), statement_timestamp() + interval '1 day'
from generate_series(1, %(rows)s::bigint)
