-- What earlier attempts of a task have done for good, a page at a time by (kind, name); only for whoever holds the claim_id.
-- One row without a name where there is nothing more; no row is a lost lease. `looked`: how many the page had before it was cut at a
-- number of bytes.
with held as materialized (
    select t.id from {schema}.tasks t where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
)
select
    s.kind, s.name, s.state, s.result::text,
    greatest(0, extract(epoch from s.due_at - statement_timestamp()) * 1000)::double precision as left_ms, s.looked
from held h
left join lateral (
    select
        page.kind, page.name, page.state, page.result, page.due_at, count(*) over () as looked, row_number() over (order by page.kind, page.name) as place,
        sum(octet_length(page.result::text)) over (order by page.kind, page.name) as bytes
    from (
        select s.kind, s.name, s.state, s.result, s.due_at
        from {schema}.steps s
        where s.task_id = h.id and (s.kind, s.name) > (%(kind)s::text, %(name)s::text)
        order by s.kind, s.name
        limit %(limit)s
    ) page
) s on s.place = 1 or s.bytes is null or s.bytes <= %(bytes)s
order by s.kind, s.name
