-- Why a bulk action cannot act on an ended task `t`, or null. A node is retried with its workflow. A task is still needed if its
-- workflow is stored, or its parent has not ended. A repeated send must find a task that was sent less than an hour ago.
case
        when %(action)s = 'retry' and t.workflow_id is not null then 'WORKFLOW'
        when %(action)s <> 'delete' then null
        when (select w.id from {schema}.workflows w where w.id = t.workflow_id) is not null then 'WORKFLOW'
        when (select p.state from {schema}.tasks p where p.id = t.parent_id) in ('PENDING', 'CLAIMED', 'RUNNING') then 'PARENT'
        when t.sent_at > statement_timestamp() - interval '1 hour' then 'RECENT'
    end
