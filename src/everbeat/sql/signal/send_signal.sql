-- Store a signal for a task or a workflow. The client generates the id, so a repeated call returns the same result. The function is defined
-- in schema/0009_liveness/93_send_signal.
select verdict, kind, state
from {schema}.send_signal(%(id)s, %(target)s, %(name)s::text, %(value)s::text::json, %(channel)s::text)
