-- The same for workflows.
create trigger workflows_labelled after insert on {schema}.workflows
for each row when (new.labels is not null) execute function {schema}.index_labels()
