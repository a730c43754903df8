-- The column `labels` contains the labels of a task, an object of texts. `on_failure` is the task to send when the task fails for good. `history` gets the columns
-- before `tasks`, because move_to_history writes all columns of `tasks` to it.
alter table {schema}.history add column labels jsonb, add column on_failure json
