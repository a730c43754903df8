-- Return the streams of a task and the number of their last items. The primary key is searched twice for each stream, so the number of items
-- does not matter.
with recursive found as (
    (select s.name from {schema}.stream_items s where s.task_id = %(id)s order by s.name limit 1)
    union all
    select (select s.name from {schema}.stream_items s where s.task_id = %(id)s and s.name > f.name order by s.name limit 1)
    from found f where f.name is not null
)
select f.name, (select max(s.number) from {schema}.stream_items s where s.task_id = %(id)s and s.name = f.name) as items
from found f where f.name is not null
