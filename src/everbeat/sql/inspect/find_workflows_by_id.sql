-- List the workflows whose ids lie between two given ids, newest id first.
select w.id, w.name, w.state
from {schema}.workflows w
where w.id between %(first)s and %(last)s
order by w.id desc
limit %(limit)s
