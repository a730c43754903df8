-- Why a bulk action cannot act on an ended task `t`, or null. A node is retried with its workflow. A task is still needed if its
-- workflow is stored, or its parent has not ended. If its parent is a node, a later task of this node can continue with the children, until
-- the workflow has ended. A repeated send must find a task that was sent less than an hour ago.
case
        when %(action)s = 'retry' and t.workflow_id is not null then 'WORKFLOW'
        when %(action)s <> 'delete' then null
        when (select w.id from {schema}.workflows w where w.id = t.workflow_id) is not null then 'WORKFLOW'
        when (select p.state from {schema}.tasks p where p.id = t.parent_id) in ('PENDING', 'CLAIMED', 'RUNNING') then 'PARENT'
        when (
            select w.ended_at is null from {schema}.tasks p join {schema}.workflows w on w.id = p.workflow_id where p.id = t.parent_id
        ) then 'PARENT'
        when t.sent_at > statement_timestamp() - interval '1 hour' then 'RECENT'
    end
