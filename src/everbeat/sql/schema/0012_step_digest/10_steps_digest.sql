-- A hash of the arguments of a step or a child, so that the next attempt notices changed arguments. Null for sleeps and events, and for
-- records that earlier code wrote. A record without a hash matches any arguments.
alter table {schema}.steps add column digest text
