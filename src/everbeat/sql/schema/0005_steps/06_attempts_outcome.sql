-- SUSPENDED: the code released its slot until a time or an event. Existing rows satisfied the earlier, narrower constraint.
alter table {schema}.attempts
    drop constraint attempts_outcome,
    add constraint attempts_outcome
        check (outcome in ('COMPLETED', 'FAILED', 'CANCELLED', 'RELEASED', 'SUSPENDED', 'CRASHED', 'LOST')) not valid
