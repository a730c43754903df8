-- Take the publishing turn from an ended worker and notify the other workers, one of which takes the turn. The observer that ends the
-- worker runs this.
create function {schema}.free_relay() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    told_on text;
begin
    update {schema}.relay r set holder = null, taken_until = statement_timestamp(), listens = true where r.holder = new.id
    returning r.channel into told_on;
    if told_on is not null then
        perform pg_notify(told_on, 'r');
    end if;
    return null;
end
$$
