-- The latest entries of the audit log: those with a higher id than `after_action`, and the `overlap` ids before it. An entry can become
-- visible after one with a higher id. Null for `after_action` means the highest id. The primary key serves it.
select l.id, l.actor, l.action, l.target
from {schema}.audit_log l
where l.id > coalesce(%(after_action)s::bigint, (select max(m.id) from {schema}.audit_log m)) - %(overlap)s
order by l.id desc
limit %(most_actions)s
