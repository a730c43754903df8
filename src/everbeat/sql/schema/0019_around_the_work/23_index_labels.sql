-- Add the labels of a new task or workflow to the search index. The rows exist already if the task comes back from `history`. The trigger must not
-- reject rows of other programs. So it leaves out labels without a value, and labels that are too long for the index.
create function {schema}.index_labels() returns trigger language plpgsql as $$
begin
    insert into {schema}.labels (key, value, id)
    select l.key, l.value, new.id
    from jsonb_each_text(case when jsonb_typeof(new.labels) = 'object' then new.labels else '{{}}' end) l
    where octet_length(l.key) <= 256 and octet_length(l.value) <= 800
    on conflict do nothing;
    return null;
end
$$
