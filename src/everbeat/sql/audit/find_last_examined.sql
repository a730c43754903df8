-- Return the ids of the last entry of the audit log that audit/list_actions examines and of the entry after it, if there are any.
select l.id
from {schema}.audit_log l
where {fragment/audit_scope}
order by l.at desc, l.id desc
offset %(most)s - 1
limit 2
