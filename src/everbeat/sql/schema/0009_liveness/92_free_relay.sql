-- Take the publishing turn from an ended worker and notify the other workers, one of which takes the turn. The observer that ends the
-- worker runs this.
-- The function sends no notification while PostgreSQL's notification queue is at least half full, because a full queue makes commits fail.
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
