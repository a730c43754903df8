-- The records of a task in `history`: types with the columns of the tables. The row types of the tables themselves would forbid a later
-- version to add a column with a default to the tables.
do $$
declare
    made record;
begin
    for made in
        select m.type, string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum) as attributes
        from (
            values ('history_attempt', '{schema}.attempts'::regclass), ('history_step', '{schema}.steps'),
                ('history_signal', '{schema}.signals'), ('history_recovery', '{schema}.recoveries')
        ) as m (type, of)
        join pg_attribute a on a.attrelid = m.of and a.attnum > 0 and not a.attisdropped
        group by m.type
    loop
        execute format('create type {schema}.%I as (%s)', made.type, made.attributes);
    end loop;
end
$$
