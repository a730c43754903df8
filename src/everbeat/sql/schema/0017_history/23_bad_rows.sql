-- Rows with a value that everbeat never writes and cannot use, at most `most` of them. The columns come from the catalog, so that later
-- columns are included. Partitions of `history` are left out. The function reads a limited number of live tasks and of the newest rows of each table.
create or replace function {schema}.bad_rows(most integer) returns table (relation text, id text, attribute text, value text) language plpgsql stable as $$
declare
    looked record;
    left_over integer := most;
    found_now integer;
begin
    for looked in
        select c.relname::text as name, judged.tests, coalesce(key.id, '''''') as id, coalesce('order by ' || key.place, '') as place
        from pg_class c
        cross join lateral (
            select string_agg(format('(%L, %s, left(r.%I::text, 60))', a.attname, rule.test, a.attname), ', ') as tests
            from pg_attribute a
            cross join lateral (
                select case
                    when a.atttypid = 'timestamptz'::regtype
                        then format('not (r.%I between ''0002-01-01 00:00:00+00'' and ''9998-12-31 23:59:59+00'')', a.attname)
                    when a.atttypid = 'smallint'::regtype then format('r.%I in (-32768, 32767)', a.attname)
                    when a.atttypid = 'integer'::regtype then format('r.%I in (-2147483648, 2147483647)', a.attname)
                    when a.atttypid = 'bigint'::regtype
                        then format('r.%I in (''-9223372036854775808''::bigint, 9223372036854775807)', a.attname)
                    when a.atttypid in ('real'::regtype, 'double precision'::regtype)
                        then format('r.%I::float8 in (''NaN'', ''Infinity'', ''-Infinity'')', a.attname)
                    when a.atttypid = 'text[]'::regtype
                        then format(
                            'case when array_ndims(r.%1$I) > 1 then true else array_position(r.%1$I, null) is not null end', a.attname)
                    when a.atttypid = 'json'::regtype and a.attname in (
                        'args', 'policy', 'needs', 'flags', 'progress', 'error', 'metadata', 'certificate', 'options', 'messages'
                    ) then format('json_typeof(r.%1$I) <> ''object'' or not {schema}.is_readable(r.%1$I)', a.attname)
                    when a.atttypid = 'json'::regtype then format('not {schema}.is_readable(r.%I)', a.attname)
                    when a.atttypid = 'text'::regtype and a.attname in (
                        'id', 'name', 'queue', 'key', 'serial', 'worker_id', 'supervisor_id', 'claimed_by_worker_id'
                    ) then format('octet_length(r.%I) > 2500', a.attname)
                end || case
                    when c.relname = 'tasks' and a.attname in ('claimed_at', 'claimed_by_worker_id')
                        then format(' or r.state in (''CLAIMED'', ''RUNNING'') and r.%I is null', a.attname)
                    when c.relname = 'tasks' and a.attname = 'started_at' then ' or r.state = ''RUNNING'' and r.started_at is null'
                    else ''
                end as test
            ) rule
            where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and rule.test is not null
        ) judged
        cross join lateral (
            select string_agg(format('left(r.%I::text, 100)', a.attname), ' || '' '' || ' order by k.place) as id,
                string_agg(format('%I desc', a.attname), ', ' order by k.place) as place
            from pg_index i
            cross join lateral unnest(i.indkey::smallint[]) with ordinality as k (attnum, place)
            join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
            where i.indrelid = c.oid and i.indisprimary
        ) key
        where c.relnamespace = '{schema}'::regnamespace and c.relkind = 'r' and not c.relispartition and judged.tests is not null
          and c.relname not in ('installation', 'relay', 'schema_versions', 'turns')
        order by c.relname <> 'tasks', c.relname
    loop
        return query execute format(
            'select %1$L::text, %2$s, bad.attribute::text, bad.value::text from (%3$s) r'
            ' cross join lateral (values %4$s) as bad (attribute, is_bad, value) where bad.is_bad limit %5$s',
            looked.name, looked.id,
            case when looked.name = 'tasks' then
                '(select * from {schema}.tasks where state = ''PENDING'' and serial is null and needs_id is null limit 10000) union all '
                '(select * from {schema}.tasks where state = ''PENDING'' and serial is null and needs_id is not null limit 10000) union all '
                '(select * from {schema}.tasks where state in (''CLAIMED'', ''RUNNING'') limit 10000) union all '
                '(select * from {schema}.tasks where serial is not null and state in (''PENDING'', ''CLAIMED'', ''RUNNING'')'
                ' and state = ''PENDING'' limit 10000) union all '
                '(select * from (select * from {schema}.tasks order by id desc limit 2000) newest'
                ' where state not in (''PENDING'', ''CLAIMED'', ''RUNNING''))'
            else format('select * from {schema}.%I %s limit 10000', looked.name, looked.place) end,
            looked.tests, left_over);
        get diagnostics found_now = row_count;
        left_over := left_over - found_now;
        exit when left_over <= 0;
    end loop;
end
$$
