-- Number each new limit.
create trigger limits_new before insert on {schema}.limits
    for each row execute function {schema}.number_limit()
