-- All tasks, also those in `history`, for statements that read tasks of any age. Their records are null for the tasks in `tasks`. The
-- columns come from the catalog, so the two tables are combined by name.
do $$
begin
    execute format(
        'create view {schema}.all_tasks as'
        ' select %1$s, null::timestamptz as ended_at, null::{schema}.history_attempt[] as attempts, null::{schema}.history_step[] as steps,'
        ' null::{schema}.history_signal[] as signals, null::{schema}.history_recovery[] as recoveries from {schema}.tasks'
        ' union all select %1$s, ended_at, attempts, steps, signals, recoveries from {schema}.history',
        {schema}.columns_of('{schema}.tasks', '')
    );
end
$$
