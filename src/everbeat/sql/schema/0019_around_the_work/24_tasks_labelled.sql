-- A trigger covers every statement that inserts tasks. A task without labels costs only the test of the condition.
create trigger tasks_labelled after insert on {schema}.tasks
for each row when (new.labels is not null) execute function {schema}.index_labels()
