-- Return the database's time.
select statement_timestamp() as now
