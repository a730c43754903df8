-- Each role that can use the schema can read the floor of the changes, which is a transaction id. Every claim reads it.
grant select on sequence {schema}.line_changes_floor to public
