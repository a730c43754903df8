-- The captured log records of attempts, in parts of up to 16 kB. `lines` is a JSON array of records, and `first` and `last` are the numbers of its
-- first and last record. Each attempt numbers its records from 1, so a gap between two parts counts records that were not kept. An attempt has at
-- most 16 parts: the first 4 stay, and the others are written anew in turn. `claim_id` keeps apart the logs of two claims with the same attempt
-- number, which a failover can cause. The rows stay here when their task moves to `history`. Retention deletes them by their age.
create table {schema}.attempt_logs (
    task_id     uuid not null,
    attempt     integer not null,
    claim_id    uuid not null,
    part        smallint not null,
    first       integer not null,
    last        integer not null,
    lines       json not null,
    written_at  timestamptz not null default statement_timestamp(),
    primary key (task_id, attempt, claim_id, part)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000)
