-- PENDING tasks that can expire.
create index tasks_deadline on {schema}.tasks (good_until) where state = 'PENDING' and good_until is not null
