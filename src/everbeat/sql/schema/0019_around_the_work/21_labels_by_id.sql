-- Find the labels of deleted tasks and workflows. New ids are the largest, so an insert appends to the index. The table is empty, so building
-- the index blocks nothing.
do $$
begin
    create index labels_by_id on {schema}.labels (id);
end
$$
