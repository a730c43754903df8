-- Whoever finds out that a worker has ended takes the turn to publish from it.
create function {schema}.free_relay() returns trigger language plpgsql as $$
begin
    update {schema}.relay set holder = null, taken_until = statement_timestamp(), listens = true where holder = new.id;
    return null;
end
$$
