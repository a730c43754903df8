-- The gates of a workflow node's task, or of a failure handler. A gate is known, or it is the limit with the argument at `path` as its key. A key
-- of more than 200 bytes becomes its hash. Keys are computed here, because the arguments are known only when the task is sent. `otherwise` is the
-- key of an argument that is missing, as in a send. A null on the path has the key `null`. A NUL is legal in JSON, but PostgreSQL cannot take any text
-- out of such JSON. So the NULs are left out.
create or replace function {schema}.gates_of(gates json, args json) returns text[] language sql immutable as $$
    select array_agg(
        coalesce(
            g.gate ->> 'gate',
            (g.gate ->> 'limit') || '/' || case
                when octet_length(k.key) <= 200 then k.key else 'sha256:' || encode(sha256(convert_to(k.key, 'UTF8')), 'hex')
            end
        ) order by g.place
    )
    from json_array_elements(gates) with ordinality as g (gate, place)
    cross join lateral (select array(select json_array_elements_text(coalesce(g.gate -> 'path', '[]'))) as path) p
    cross join lateral (
        select case
            when position(E'\\u0000' in args::text) > 0 then regexp_replace(args::text, E'(?<!\\\\)((?:\\\\\\\\)*)\\\\u0000', E'\\1', 'g')::json else args
        end as args
    ) a
    cross join lateral (
        select coalesce(
            a.args #>> p.path, case when a.args -> p.path[1] is null then coalesce(g.gate ->> 'otherwise', 'null') else 'null' end
        ) as key
    ) k
$$
