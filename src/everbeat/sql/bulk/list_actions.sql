-- List bulk actions, those that were requested last first, or return one of them. Actions that have not ended are listed first.
select {fragment/bulk_fields}
from {schema}.bulk_actions b
where %(id)s::uuid is null or b.id = %(id)s
order by b.ended_at is null desc, b.requested_at desc, b.id desc
limit %(limit)s
