-- Send tasks one at a time inside the server, each in its own transaction, as task/insert_task does. The measurement shows how much
-- concurrent senders slow each other down when no client is involved. The settings everbeat.sends and everbeat.task contain the
-- number of sends and the task. The announcements, at most 20 per second and process, are left out.
do $$
begin
    for number in 1..current_setting('everbeat.sends')::integer loop
        insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at)
        values (
            gen_random_uuid(), current_setting('everbeat.task'), 'default', 0, json_build_object('number', number), statement_timestamp(),
            statement_timestamp()
        );
        commit;
    end loop;
end
$$
