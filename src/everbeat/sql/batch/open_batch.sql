-- Create a batch. The client's id makes the call idempotent.
insert into {schema}.batches (id, name, on_end, on_success)
values (%(id)s, %(name)s::text, %(on_end)s::text::json, %(on_success)s::text::json)
on conflict do nothing
