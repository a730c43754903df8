-- The tasks that ended long enough ago, with all their records: the columns of `tasks`, the end, and the records as arrays. Arrays of rows keep each value exactly as it was stored, also JSON that `jsonb` rejects. A task is in this table or in `tasks`, never in
-- both. The check lets the planner leave the partitions out of a search for live tasks.
create table {schema}.history (
    like {schema}.tasks,
    ended_at    timestamptz not null,
    attempts    {schema}.history_attempt[],
    steps       {schema}.history_step[],
    signals     {schema}.history_signal[],
    recoveries  {schema}.history_recovery[],
    constraint history_state check (state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')),
    primary key (id, ended_at)
) partition by range (ended_at)
