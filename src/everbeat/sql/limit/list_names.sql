-- Return the names of limits, for the message about an unknown one.
select l.name from {schema}.limits l order by l.name limit 10000
