-- Delete lines without live tasks that have been idle for an hour: one step of a scan of the primary key. The next change of such a line
-- creates it anew. A line that a claim has locked is skipped. Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select l.line, l.state, l.turn from {schema}.lines l
    where l.line > %(after)s
    order by l.line
    limit %(limit)s
), idle as materialized (
    select k.line
    from looked f
    cross join lateral (
        select l.line from {schema}.lines l
        where l.line = f.line and l.state = 'I' and coalesce(l.turn, '-infinity') < statement_timestamp() - interval '1 hour'
        limit 1 for update skip locked
    ) k
    where f.state = 'I' and not exists (
        select from {schema}.tasks t where t.serial = f.line and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
    )
), gone as (
    delete from {schema}.lines l where l.line = any(array(select i.line from idle i))
)
select
    case when (select count(*) from looked) = %(limit)s then (select max(line) from looked) end as next_after
