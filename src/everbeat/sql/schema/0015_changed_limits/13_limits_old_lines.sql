-- The limits whose lines have to be judged again.
create index {concurrently} limits_old_lines on {schema}.limits (name) where has_old_lines
