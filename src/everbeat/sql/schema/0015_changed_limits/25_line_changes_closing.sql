-- Closures of gates. They are applied with the releases of permits, or a task would start between the two.
create index {concurrently} line_changes_closing on {schema}.line_changes (xid) where closed_until is not null
