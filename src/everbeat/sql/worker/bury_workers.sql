-- End workers permanently. FOR UPDATE waits for claims in flight, which hold FOR KEY SHARE, so no claim can succeed afterwards.
with grave as materialized (
    select w.id from {schema}.workers w
    where (w.id = any(%(worker_ids)s::text[]) or w.supervisor_id = %(supervisor_id)s::text) and w.ended_at is null
    order by w.id
    for update
)
update {schema}.workers w
set ended_at = statement_timestamp(), ended_how = %(how)s, ended_cause = %(cause)s, exit_code = %(exit_code)s, signal = %(signal)s
from grave g
where w.id = g.id
returning w.id
