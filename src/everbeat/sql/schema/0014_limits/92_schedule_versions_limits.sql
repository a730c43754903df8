-- The limits that the code of a version declares.
alter table {schema}.schedule_versions add column limits json
