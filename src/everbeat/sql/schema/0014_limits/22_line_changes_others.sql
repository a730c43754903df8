-- All other changes.
create index {concurrently} line_changes_others on {schema}.line_changes (xid) where not freed
