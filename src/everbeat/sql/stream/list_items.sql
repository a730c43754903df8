-- Return a page of a stream's items after a number, in their order, up to a number of bytes. Each step searches the primary key for the next item,
-- and the page ends with the item that does not fit. So however large the items of the stream are, only those of the page are read.
with recursive page as (
    (
        select s.number, s.value::text as value, s.at, s.attempt, octet_length(s.value::text)::bigint as bytes, 1 as place
        from {schema}.stream_items s
        where s.task_id = %(id)s and s.name = %(name)s and s.number > %(after)s
        order by s.number
        limit 1
    )
    union all
    select i.number, i.value, i.at, i.attempt, p.bytes + octet_length(i.value), p.place + 1
    from page p
    cross join lateral (
        select s.number, s.value::text as value, s.at, s.attempt from {schema}.stream_items s
        where s.task_id = %(id)s and s.name = %(name)s and s.number > p.number
        order by s.number
        limit 1
    ) i
    where p.place < %(limit)s and p.bytes < %(bytes)s
)
select p.number, p.value, p.at, p.attempt from page p
where p.place = 1 or p.bytes <= %(bytes)s
order by p.number
