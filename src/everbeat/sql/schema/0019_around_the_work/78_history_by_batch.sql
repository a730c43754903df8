-- The same for the moved tasks. The index is made for the partitions to come (`on only`), because building it in the others would block the moves
-- to them. The partitions that exist have hardly any task of a batch: they are searched without it until they are dropped.
do $$
begin
    create index history_by_batch on only {schema}.history (batch_id, id) where batch_id is not null;
end
$$
