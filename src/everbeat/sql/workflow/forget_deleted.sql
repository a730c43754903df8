-- Delete outbox entries of workflows that no longer exist. Each workflow is looked up by its id, because there are far more workflows than
-- entries.
delete from {schema}.outbox o
where o.id = any(array(
    select h.id from (select * from {schema}.outbox order by id limit %(limit)s) h
    where (select w.id from {schema}.workflows w where w.id = h.workflow_id) is null
))
