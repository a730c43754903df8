-- Return how many tasks with a given name completed per second, from the first start to the last completion.
select (count(*) / extract(epoch from max(t.completed_at) - min(t.started_at)))::float8 as per_s
from {schema}.tasks t
where t.name = %(name)s and t.state = 'COMPLETED'
