-- List the ticks of a schedule between two moments for which a task was sent.
select k.at from {schema}.ticks k
where k.schedule = %(name)s and k.at >= %(since)s and k.at < %(until)s and k.outcome = 'SENT'
order by k.at
