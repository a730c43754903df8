-- Which of these trees have no supervisor any more: nobody needs to prove their death.
select s.session_name
from {schema}.supervisors s
where s.session_name = any(%(names)s::text[])
group by s.session_name
having bool_and(s.ended_at is not null)
