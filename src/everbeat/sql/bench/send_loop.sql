-- Sends tasks one at a time, each in a transaction of its own, as task/insert_task does, with no client between: as many as the setting
-- everbeat.sends says, of the task function in everbeat.task. What senders cost each other in the server, and nothing else.
do $$
begin
    for number in 1..current_setting('everbeat.sends')::integer loop
        insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at)
        values (
            gen_random_uuid(), current_setting('everbeat.task'), 'default', 0, json_build_object('number', number), statement_timestamp(),
            statement_timestamp()
        );
        perform pg_notify(current_setting('everbeat.told_on'), 't:default')
        where exists (select from {schema}.workers w where w.listens and w.ended_at is null) and (select pg_notification_queue_usage()) < 0.5;
        commit;
    end loop;
end
$$
