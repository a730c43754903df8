-- What recovery knows more of a task: its place in a serial line, whether it is suspected of killing processes, whether it runs alone
-- in its process, what it has finished of its work, and when its code last said anything.
alter table {schema}.tasks
    add column serial text,
    add column serial_at timestamptz,
    add column suspect boolean not null default false,
    add column alone boolean not null default false,
    add column checkpoint json,
    add column progress_at timestamptz
