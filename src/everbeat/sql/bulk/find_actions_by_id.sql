-- List the bulk actions whose ids begin with a prefix.
select b.id, b.action, b.state from {schema}.bulk_actions b
where b.id >= %(first)s and b.id <= %(last)s
order by b.id desc
limit %(limit)s
