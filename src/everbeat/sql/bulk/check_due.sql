-- Return whether a bulk action is due, with an index that contains only the actions that have not ended.
select exists (select from {schema}.bulk_actions b where b.ended_at is null and (b.next_at <= statement_timestamp() or b.changed_at > statement_timestamp())) as is_due
