-- More proofs of death: a file that the whole tree keeps locked, and a slot that only one supervisor holds at a time.
alter table {schema}.supervisors
    add column lock_file text,
    add column slot text
