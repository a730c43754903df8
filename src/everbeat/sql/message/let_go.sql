-- The turn to publish is free for others at once.
update {schema}.relay set holder = null, taken_until = statement_timestamp(), listens = true where holder = %(holder)s
