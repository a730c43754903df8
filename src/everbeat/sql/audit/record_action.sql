-- Note an action of an operator in the audit log. Run it in the transaction of the action. The id of the call makes it
-- idempotent.
insert into {schema}.audit_log (actor, origin, action, target, affected, outcome, note, call)
values (%(actor)s, %(origin)s, %(action)s, %(target)s, %(affected)s, %(outcome)s, %(note)s, %(call)s)
on conflict (call) do nothing
