-- Samples of the live tasks of each queue. `at` is the time of the sample, which is the same for all of its rows. A queue without live tasks
-- has no row. `seconds` is 3600 for the first sample of an hour, 60 for the first of another minute, and 10 for others. They are kept for
-- 30 days, 48 hours and 2 hours. `due` to `running` count tasks, and no task is counted twice. `scheduled` are PENDING tasks that are not due,
-- without the suspended ones. Counting stops at 10,000 of each; `at_least` names the counts that can be too low. `oldest_due_s` is the time
-- for which the oldest due task has been due. The first sample of a minute also has one row whose queue is null. `table_bytes` is the size of
-- all tables of this schema with their indexes. `dead_rows` comes from the statistics. `oldest_transaction_s` is the age of the oldest
-- transaction that the sampler's role can see.
create table {schema}.depths (
    seconds               integer not null constraint depths_seconds check (seconds in (10, 60, 3600)),
    at                    timestamptz not null,
    queue                 text,
    due                   bigint,
    scheduled             bigint,
    suspended             bigint,
    claimed               bigint,
    running               bigint,
    oldest_due_s          float8,
    at_least              text[],
    table_bytes           bigint,
    dead_rows             bigint,
    oldest_transaction_s  float8
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
