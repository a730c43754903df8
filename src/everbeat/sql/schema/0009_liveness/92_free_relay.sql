-- Whoever finds out that a worker has ended takes the turn to publish from it, and tells the others, of whom one takes it.
-- Sends no notification while PostgreSQL's queue of notifications is half full: a full one refuses the commit.
create or replace function {schema}.free_relay() returns trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    told_on text;
begin
    update {schema}.relay r set holder = null, taken_until = statement_timestamp(), listens = true where r.holder = new.id
    returning r.channel into told_on;
    if told_on is not null then
        perform pg_notify(told_on, 'r') where (select pg_notification_queue_usage()) < 0.5;
    end if;
    return null;
end
$$
