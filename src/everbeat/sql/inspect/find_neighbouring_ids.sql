-- Return the task and workflow ids just before and just after each given id. These ids share the most leading digits with the given id.
select
    asked.id,
    (select t.id from {schema}.all_tasks t where t.id < asked.id order by t.id desc limit 1) as task_before,
    (select t.id from {schema}.all_tasks t where t.id > asked.id order by t.id limit 1) as task_after,
    (select w.id from {schema}.workflows w where w.id < asked.id order by w.id desc limit 1) as workflow_before,
    (select w.id from {schema}.workflows w where w.id > asked.id order by w.id limit 1) as workflow_after
from unnest(%(ids)s::uuid[]) as asked (id)
