-- Write the message of a task again if a send moved the task to a later moment or to another queue. The first message would come too early, or
-- to the workers of the old queue. Only sends that change a waiting task set last_send, so the trigger costs nothing for other updates.
create or replace trigger tasks_message_moved after update of last_send on {schema}.tasks
    for each row
    when (new.state = 'PENDING' and new.enqueued_at >= old.enqueued_at and (new.enqueued_at > old.enqueued_at or new.queue <> old.queue))
    execute function {schema}.write_again()
