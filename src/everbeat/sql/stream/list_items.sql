-- Return a page of a stream's items after a number, in their order, up to a number of bytes. The primary key serves the page.
select p.number, p.value, p.at, p.attempt
from (
    select i.number, i.value::text as value, i.at, i.attempt,
        sum(octet_length(i.value::text)) over (order by i.number) as bytes, row_number() over (order by i.number) as place
    from (
        select s.number, s.value, s.at, s.attempt from {schema}.stream_items s
        where s.task_id = %(id)s and s.name = %(name)s and s.number > %(after)s
        order by s.number
        limit %(limit)s
    ) i
) p
where p.place = 1 or p.bytes <= %(bytes)s
order by p.number
