-- Return whether all sent tasks have been put into their lines and no line is ready.
select not exists (select from {schema}.line_changes) and not exists (select from {schema}.lines where state = 'R') as are_waiting
