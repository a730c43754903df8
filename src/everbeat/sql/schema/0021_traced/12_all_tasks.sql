-- A view can only be replaced if its columns stay in their place, so the new column comes last. `tasks` has no columns for the records.
do $$
declare
    v_tasks text;
    v_history text;
begin
    select
        string_agg(
            case when t.attname is null then format('null::%s as %I', format_type(v.atttypid, v.atttypmod), v.attname) else quote_ident(v.attname) end,
            ', ' order by v.attnum
        ),
        string_agg(quote_ident(v.attname), ', ' order by v.attnum)
    into v_tasks, v_history
    from pg_catalog.pg_attribute v
    left join pg_catalog.pg_attribute t
        on t.attrelid = '{schema}.tasks'::regclass and t.attname = v.attname and t.attnum > 0 and not t.attisdropped
    where v.attrelid = '{schema}.all_tasks'::regclass and v.attnum > 0 and not v.attisdropped;
    execute format(
        'create or replace view {schema}.all_tasks as'
        ' select %s, context from {schema}.tasks union all select %s, context from {schema}.history', v_tasks, v_history
    );
end
$$
