-- What recovery knows more of a task: its place in a serial line, whether it is suspected of killing processes, whether it runs alone
-- in its process, what it has finished of its work (the number grows within an attempt), when its code last said anything, and which
-- lease of a dead holder a recovery hook said to leave as it is (it stands while that claim does); which call of an operator made it
-- run again.
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
