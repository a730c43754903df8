-- Return whether there are more failed tasks than a list by the latest events examines (`most`).
select exists (
    select from {schema}.all_tasks t
    where t.state = 'FAILED' and {fragment/task_scope}
    order by t.failed_at desc
    offset %(most)s
    limit 1
) as has_more
