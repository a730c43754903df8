-- SUSPENDED: the code gave its slot back until a time or an event. What is there satisfies the narrower constraint before this one.
alter table {schema}.attempts
    drop constraint attempts_outcome,
    add constraint attempts_outcome
        check (outcome in ('COMPLETED', 'FAILED', 'CANCELLED', 'RELEASED', 'SUSPENDED', 'CRASHED', 'LOST')) not valid
