-- The columns of a table or composite type, each after p_prefix, separated by commas, in their order. The functions that move tasks read them from the
-- catalog, so that the columns of later versions move too.
create function {schema}.columns_of(p_table regclass, p_prefix text) returns text language sql stable as $$
    select string_agg(p_prefix || quote_ident(a.attname), ', ' order by a.attnum)
    from pg_catalog.pg_attribute a where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
$$
