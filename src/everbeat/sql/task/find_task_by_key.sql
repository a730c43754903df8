-- Return the task that has a key now: the task that a send with this key would find. A live task with a plain key comes first.
select t.id from {schema}.tasks t
where t.name = %(name)s and t.key = %(key)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
union all
select u.task_id from {schema}.unique_keys u
where u.name = %(name)s and u.key = %(key)s and (u.until is null or u.until > statement_timestamp())
limit 1
