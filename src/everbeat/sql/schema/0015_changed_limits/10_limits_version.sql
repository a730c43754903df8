-- Each change of a limit has a new version. A gate whose version is older is judged again (see apply_line_changes). The change itself cannot
-- find all lines that wait: a claim that has judged one by older numbers might commit later. `has_old_gates`: gates may have an older version.
-- `has_old_lines`: lines have been judged by an earlier fairness, earlier weights or an earlier `when_full`.
alter table {schema}.limits
    add column version bigint not null default 0,
    add column changed_at timestamptz,
    add column has_old_gates boolean not null default false,
    add column has_old_lines boolean not null default false
