-- Return when the last task ended that a list of recoveries examines, and then the task after it, if they exist. A list
-- examines at most `most` recovered tasks in `history`.
select h.ended_at
from {schema}.history h
where {fragment/recovered_scope}
order by h.ended_at desc
offset %(most)s - 1
limit 2
