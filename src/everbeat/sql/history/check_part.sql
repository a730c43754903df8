-- Return whether a partition of `history` contains tasks of a workflow that a retention pass keeps. The pass does not drop such a partition.
select exists (
    select from {schema}.workflows w
    where not {fragment/is_old_workflow} and exists (
        select from {schema}.history h where h.workflow_id = w.id and h.ended_at >= %(since)s and h.ended_at < %(until)s
    )
) as is_needed
