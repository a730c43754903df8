-- Return the parts of one captured log that contain records after a number, in their order. The primary key serves the statement, and a log has at
-- most 16 parts.
select l.first, l.last, l.lines::text as lines
from {schema}.attempt_logs l
where l.task_id = %(id)s and l.attempt = %(attempt)s and l.claim_id = %(claim_id)s and l.last > %(after)s
order by l.first
