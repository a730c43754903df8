-- Pause the task functions that have reached the limit of crashes within the window. Return the newly paused task functions.
insert into {schema}.pauses (kind, name, paused_by, reason, crashes)
select 'task', r.name, 'brake', %(reason)s, count(distinct r.task_id)
from {schema}.recoveries r
where r.noticed_at > statement_timestamp() - %(window_ms)s * interval '1 millisecond'
  and r.noticed_at <= statement_timestamp() and r.name = any(%(names)s::text[]) and r.charge = 'crash'
group by r.name
having count(distinct r.task_id) >= %(crashes)s
on conflict (kind, name) do nothing
returning name, crashes, reason
