-- Supervisors that were not ended and ran under this very kernel and in this very pid namespace: who starts there can prove their death.
select s.id, s.hostname, s.pid, s.process_started, s.beat_seq from {schema}.supervisors s
where s.ended_at is null and s.boot_id = %(boot_id)s and s.pid_namespace = %(pid_namespace)s and s.id <> %(id)s
order by s.id
