-- Send tasks one at a time inside the server, each in its own transaction, as task/insert_task does. The measurement shows how much
-- concurrent senders slow each other down when no client is involved. The settings everbeat.sends, everbeat.task and everbeat.channel
-- contain the number of sends, the task and the channel.
do $$
begin
    for number in 1..current_setting('everbeat.sends')::integer loop
        insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at)
        values (
            gen_random_uuid(), current_setting('everbeat.task'), 'default', 0, json_build_object('number', number), statement_timestamp(),
            statement_timestamp()
        );
        perform pg_notify(current_setting('everbeat.channel'), 't:default')
        where exists (select from {schema}.workers w where w.listens and w.ended_at is null) and (select pg_notification_queue_usage()) < 0.5;
        commit;
    end loop;
end
$$
