-- The carrier of a task: an object of texts, such as the `traceparent` of the span that sent the task. It is null, and then takes no space, for
-- tasks that were sent without tracing.
alter table {schema}.tasks add column context json
