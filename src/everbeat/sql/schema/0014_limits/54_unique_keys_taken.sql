-- See clear_key.
create or replace trigger unique_keys_taken before insert on {schema}.unique_keys
    for each row execute function {schema}.clear_key()
