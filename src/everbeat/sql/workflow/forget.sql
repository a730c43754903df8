-- What happened to workflows that are not there any more concerns nobody. Looked up one by one: all workflows are many more.
delete from {schema}.outbox o
where o.id = any(array(
    select h.id from (select * from {schema}.outbox order by id limit %(limit)s) h
    where (select w.id from {schema}.workflows w where w.id = h.workflow_id) is null
))
