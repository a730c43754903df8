-- Released permits. They are applied first, so that they do not wait behind a large number of sent tasks.
create index {concurrently} line_changes_freed on {schema}.line_changes (xid) where freed
