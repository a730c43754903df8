-- A view can only be replaced if its columns stay in their place, so the new column follows the records.
do $$
begin
    execute format(
        'create or replace view {schema}.all_tasks as'
        ' select %1$s, null::timestamptz as ended_at, null::{schema}.history_attempt[] as attempts, null::{schema}.history_step[] as steps,'
        ' null::{schema}.history_signal[] as signals, null::{schema}.history_recovery[] as recoveries, labels from {schema}.tasks'
        ' union all select %1$s, ended_at, attempts, steps, signals, recoveries, labels from {schema}.history',
        (
            select string_agg(quote_ident(a.attname), ', ' order by a.attnum)
            from pg_catalog.pg_attribute a
            where a.attrelid = '{schema}.tasks'::regclass and a.attnum > 0 and not a.attisdropped
              and a.attname <> 'labels'
        )
    );
end
$$
