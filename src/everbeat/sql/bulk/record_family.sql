-- The children of a cancelled task of a bulk action have been cancelled.
update {schema}.bulk_actions b
set families = array_remove(b.families, %(task_id)s), changed_at = statement_timestamp()
where b.id = %(id)s and %(task_id)s = any(b.families)
