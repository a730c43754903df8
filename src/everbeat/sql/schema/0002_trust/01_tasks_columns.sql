-- More facts about a task for recovery:
-- its place in a serial line; whether it is suspected of killing processes; whether it runs alone in its process;
-- the finished part of its work (the number grows within an attempt); when its code last reported anything;
-- the lease of a dead holder that a recovery hook left unchanged (valid while that claim holds the task);
-- and the operator's call that ran the task again.
alter table {schema}.tasks
    add column serial text,
    add column serial_at timestamptz,
    add column suspect boolean not null default false,
    add column alone boolean not null default false,
    add column checkpoint json,
    add column checkpoint_number integer not null default 0,
    add column progress_at timestamptz,
    add column retry_call uuid,
    add column left_claim_id uuid,
    add column left_at timestamptz
