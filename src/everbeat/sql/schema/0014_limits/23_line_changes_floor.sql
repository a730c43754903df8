-- The transaction id below which all changes have been applied. A sequence has only one version, whichever snapshots are open. It is not
-- rolled back, so it must never be ahead of the changes that were applied by committed transactions.
create sequence {schema}.line_changes_floor minvalue 0 start 0
