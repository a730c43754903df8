-- The interval between a tree's heartbeats, and the silence after which its leases are stale. An observer with other settings judges the
-- tree by the longer silence. Null for trees that do not record these values.
alter table {schema}.supervisors
    add column beat_ms integer check (beat_ms between 1 and 120000),
    add column claimed_stale_ms integer check (claimed_stale_ms between 1 and 3600000),
    add column running_stale_ms integer check (running_stale_ms between 1 and 7200000)
