-- The actions of operators, one row each, written in the transaction of the action. `target` is what the action changed, and `filters` are
-- those of a bulk action. `affected` is the number of changed tasks. `call` makes a row that is written again after a lost reply unique.
create table {schema}.audit_log (
    id        bigint generated always as identity primary key,
    at        timestamptz not null default statement_timestamp(),
    actor     text not null,
    origin    text not null,
    action    text not null,
    target    text,
    filters   json,
    affected  bigint,
    outcome   text not null,
    note      text,
    call      uuid unique
)
