-- Return the outcomes of a page of tasks, in the order of their ids: the state, result and error. The page ends before the results and
-- errors exceed a number of bytes, but contains at least one task. A task without a state was deleted. Children of a live task are in `tasks`. They
-- are only in `history` if the task was retried after it had ended.
select o.place, o.state, o.result, o.error, o.missing
from (
    select
        a.place, coalesce(t.state, h.state) as state, coalesce(t.result, h.result) as result, coalesce(t.error, h.error) as error,
        coalesce(t.missing, h.missing) as missing,
        sum(coalesce(octet_length(coalesce(t.result, h.result)), 0) + coalesce(octet_length(coalesce(t.error, h.error)), 0)) over (order by a.place) as bytes
    from unnest(%(ids)s::text::uuid[]) with ordinality as a (id, place)
    left join lateral (
        select t.state, t.result::text as result, t.error::text as error, {fragment/missing_result} as missing
        from {schema}.tasks t where t.id = a.id
    ) t on true
    left join lateral (
        select m.* from (
            select t.state, t.result::text as result, t.error::text as error, {fragment/missing_result} as missing
            from {schema}.history t where t.id = a.id limit 1
        ) m
        where t.state is null
    ) h on true
) o
where o.place = 1 or o.bytes <= %(bytes)s
order by o.place
