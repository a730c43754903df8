-- Return the transaction of the oldest change that is noted but not applied.
select min(c.xid::text::bigint) as xid from (select xid from {schema}.line_changes order by xid limit 1) c
