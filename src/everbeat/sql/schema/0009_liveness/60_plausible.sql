-- A stored time, or null if no clock can have written it: infinite, before the year 2, or more than a day ahead. Ages are computed from the
-- result. PostgreSQL raises an error for the age of an infinite time, which would end the whole statement.
create function {schema}.plausible(moment timestamptz) returns timestamptz language sql stable as $$
    select case when moment between '0002-01-01 00:00:00+00' and statement_timestamp() + interval '1 day' then moment end
$$
