-- Return whether any due task of the measured queue has not finished.
select
    exists (select from {schema}.tasks where state = 'PENDING' and queue = 'default' and enqueued_at <= statement_timestamp())
    or exists (select from {schema}.tasks where state in ('CLAIMED', 'RUNNING')) as is_left
