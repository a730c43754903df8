-- Whether this role may ask for a checkpoint.
select pg_has_role(current_user, 'pg_checkpoint', 'usage')
