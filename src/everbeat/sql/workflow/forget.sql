-- What happened to workflows that are not there any more concerns nobody.
delete from {schema}.outbox o
where o.id = any(array(
    select h.id from (select * from {schema}.outbox order by id limit %(limit)s) h
    where not exists (select from {schema}.workflows w where w.id = h.workflow_id)
))
