-- The table `history` gets the column before `tasks`, because move_to_history writes all columns of `tasks` to it.
alter table {schema}.history add column context json
