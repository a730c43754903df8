-- The same for the moved tasks. A partitioned table cannot build an index concurrently: moves to `history` wait while its partitions are read once. No row
-- has a batch yet, so nothing is written.
create index history_by_batch on {schema}.history (batch_id, id) where batch_id is not null
