-- List the tasks whose ids lie between two given ids, newest id first.
select t.id, t.name, t.state
from {schema}.all_tasks t
where t.id between %(first)s and %(last)s
order by t.id desc
limit %(limit)s
