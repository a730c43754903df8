-- Return when each service of the cluster last took its turn, in seconds since 1970. The table has one row for each service.
select t.service, extract(epoch from t.taken_at)::float8 as taken_at
from {schema}.turns t
where t.taken_at > '-infinity'
order by t.service
limit 100
