-- Return whether the table of steps exists and this role can read it.
select coalesce(has_table_privilege(to_regclass(%(steps_table)s), 'select'), false)
