-- Number each change of the numbers in force and of what happens when the limit is full.
create trigger limits_changed before update on {schema}.limits
    for each row when (
        (old.concurrency, old.starts, old.period_s, old.burst, old.sliding, old.fair, old.weights::text, old.when_full)
        is distinct from (new.concurrency, new.starts, new.period_s, new.burst, new.sliding, new.fair, new.weights::text, new.when_full)
    )
    execute function {schema}.number_limit()
