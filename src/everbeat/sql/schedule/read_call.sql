-- Return the options of a schedule's call that `ScheduleInfo` does not contain. The primary key serves it.
select s.policy::text, s.flags::text, s.gates, s.costs, s.labels
from {schema}.schedules s
where s.name = %(name)s
