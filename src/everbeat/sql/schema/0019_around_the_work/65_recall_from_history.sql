-- Move the task p_id back before it is retried, or the tasks of the workflows p_workflows, as recall_many.
create or replace function {schema}.recall_from_history(p_id uuid, p_workflows uuid[]) returns bigint language plpgsql as $$
begin
    return {schema}.recall_many(case when p_id is not null then array[p_id] end, p_workflows);
end
$$
