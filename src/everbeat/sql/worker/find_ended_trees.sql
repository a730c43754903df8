-- Return the given trees of which all supervisors have ended. These trees need no other proof of death.
select s.session_name
from {schema}.supervisors s
where s.session_name = any(%(names)s::text[])
group by s.session_name
having bool_and(s.ended_at is not null)
