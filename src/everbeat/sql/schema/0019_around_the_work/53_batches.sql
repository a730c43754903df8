-- The batches, and the gathers of durable tasks (with a `waiter_id`: the task that waits for the end). A batch ends when it is sealed and all
-- its tasks have ended. `total` and the four numbers of ended tasks count the events that were processed; the other events are in
-- batch_events. `on_end` and `on_success` are the tasks to send at the end: each has an id, so it is sent only once. `problem`
-- says why PostgreSQL refused to store them. The second index lists the batches without the gathers.
-- The index batches_live finds the batches that should have ended. The table is empty, so building the index blocks nothing.
do $$
begin
create table {schema}.batches (
    id            uuid primary key,
    name          text,
    waiter_id     uuid,
    on_end        json,
    on_success    json,
    total         bigint not null default 0,
    completed     bigint not null default 0,
    failed        bigint not null default 0,
    cancelled     bigint not null default 0,
    expired       bigint not null default 0,
    created_at    timestamptz not null default statement_timestamp(),
    sealed_at     timestamptz,
    cancelled_at  timestamptz,
    ended_at      timestamptz,
    problem       text,
    unique (waiter_id, id)
);
create index batches_live on {schema}.batches (id) where ended_at is null;
end
$$
