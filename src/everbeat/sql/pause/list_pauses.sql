-- List pauses, newest first.
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes from {schema}.pauses p order by p.paused_at desc, p.kind, p.name
