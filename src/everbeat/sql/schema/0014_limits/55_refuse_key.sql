-- Abort a statement whose key another transaction has just taken. The statement is repeated and then finds the other task. Repeating it is
-- safe, as with the constraints of the same kind (see refusals.py).
create or replace function {schema}.refuse_key(of_name text, of_key text) returns bigint language plpgsql as $$
begin
    raise exception 'key % of task % is taken', of_key, of_name using errcode = 'unique_violation', constraint = 'unique_keys_pkey';
end
$$
