-- Return whether this role can run CHECKPOINT.
select pg_has_role(current_user, 'pg_checkpoint', 'usage')
