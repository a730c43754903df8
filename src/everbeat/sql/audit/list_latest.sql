-- List the actions of operators after the last one that a dashboard has seen, newest first, by the primary key.
{fragment/latest_actions}
