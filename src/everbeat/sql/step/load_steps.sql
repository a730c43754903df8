-- Return a page of the recorded steps of earlier attempts of a task, ordered by (kind, name). Requires the current claim_id. The last row
-- has no name; no row at all means a lost lease. `looked`: the number of steps in the page before the page was cut to a number of bytes.
with held as materialized (
    select t.id from {schema}.tasks t where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
)
select
    s.kind, s.name, s.state, s.result::text,
    greatest(0, extract(epoch from s.due_at - statement_timestamp()) * 1000)::double precision as left_ms, s.digest, s.looked
from held h
left join lateral (
    select
        page.kind, page.name, page.state, page.result, page.due_at, page.digest, count(*) over () as looked, row_number() over (order by page.kind, page.name) as place,
        sum(octet_length(page.result::text)) over (order by page.kind, page.name) as bytes
    from (
        select s.kind, s.name, s.state, s.result, s.due_at, s.digest
        from {schema}.steps s
        where s.task_id = h.id and (s.kind, s.name) > (%(kind)s::text, %(name)s::text)
        order by s.kind, s.name
        limit %(limit)s
    ) page
) s on s.place = 1 or s.bytes is null or s.bytes <= %(bytes)s
order by s.kind, s.name
