-- Fail a node that cannot start because of its arguments: PENDING | READY -> FAILED.
with refused as (
    update {schema}.nodes n
    set state = 'FAILED', ended_at = statement_timestamp(),
        error = json_build_object('code', %(code)s::text, 'message', %(message)s::text)
    where n.workflow_id = %(id)s and n.number = %(number)s and n.state in ('PENDING', 'READY')
    returning n.workflow_id, n.number
)
insert into {schema}.outbox (workflow_id, node) select r.workflow_id, r.number from refused r
