-- Return a page of a stream's items after a number, in their order, up to a number of bytes. Each step searches the primary key for the next 25
-- items, and the last step is the one in which the page is full. So however large the items of the stream are, only those of the page are
-- read, and at most 24 more.
with recursive page as (
    select i.number, i.value, i.at, i.attempt, i.bytes, i.place, i.place = 25 as has_more
    from (
        select n.*, sum(octet_length(n.value)) over (order by n.number) as bytes, row_number() over (order by n.number) as place
        from (
            select s.number, s.value::text as value, s.at, s.attempt from {schema}.stream_items s
            where s.task_id = %(id)s and s.name = %(name)s and s.number > %(after)s
            order by s.number
            limit 25
        ) n
    ) i
    union all
    select i.number, i.value, i.at, i.attempt, p.bytes + i.bytes, p.place + i.place, i.place = 25
    from page p
    cross join lateral (
        select n.*, sum(octet_length(n.value)) over (order by n.number) as bytes, row_number() over (order by n.number) as place
        from (
            select s.number, s.value::text as value, s.at, s.attempt from {schema}.stream_items s
            where s.task_id = %(id)s and s.name = %(name)s and s.number > p.number
            order by s.number
            limit 25
        ) n
    ) i
    where p.has_more and p.place < %(limit)s and p.bytes < %(bytes)s
)
select p.number, p.value, p.at, p.attempt from page p
where p.place <= %(limit)s and (p.place = 1 or p.bytes <= %(bytes)s)
order by p.number
