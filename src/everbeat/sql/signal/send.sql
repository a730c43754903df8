-- Sends a signal to a task or a workflow; the id is the client's, so a repeated call answers the same. What it does: schema/0005_steps.
select verdict, kind, state
from {schema}.send_signal(%(id)s, %(target)s, %(name)s::text, %(value)s::text::json, %(channel)s::text)
