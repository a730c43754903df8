-- List the names of schedules.
select s.name from {schema}.schedules s order by s.name limit %(limit)s
