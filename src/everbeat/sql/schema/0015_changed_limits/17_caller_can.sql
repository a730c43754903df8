-- Whether the role that calls has a right on a table. A function that runs with its owner's rights checks this first, because every role that
-- can use the schema can call it. SET ROLE changes neither session_user nor, in such a function, current_user.
create function {schema}.caller_can(p_right text, p_table regclass) returns boolean language sql stable as $$
    select pg_catalog.has_table_privilege(coalesce(nullif(pg_catalog.current_setting('role'), 'none'), session_user), p_table, p_right)
$$
