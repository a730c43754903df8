-- Return the locked workflows that have nothing left to wait for, and their outcome. Paused workflows are left out until they are resumed.
-- A member of a map over a result is numbered after all other nodes. When nodes are put in order, such a member takes the position of its
-- map, and the map comes after its members.
with done as materialized (
    select w.* from {schema}.workflows w
    where w.id = any(%(ids)s::text::uuid[]) and w.state in ('RUNNING', 'CANCELLING')
      and not exists (
          select from {schema}.nodes n where n.workflow_id = w.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
      )
)
select
    w.id, w.state, w.on_error, w.success::text, w.output, o.state as output_state,
    case when o.kind = 'map' then null else coalesce(t.result, c.result)::text end as output_result, o.kind = 'map' as output_is_map,
    bad.name as bad_name, bad.state as bad_state, coalesce(bad.error, bt.error)::text as bad_error,
    case when w.success is not null
         then array(select n.number from {schema}.nodes n where n.workflow_id = w.id and n.state <> 'COMPLETED' order by n.number)
    end as short,
    o.name as output_name, coalesce(o.error, t.error, c.error)::text as output_error
from done w
left join {schema}.nodes o on o.workflow_id = w.id and o.number = w.output
left join {schema}.tasks t on o.kind = 'task' and t.id = o.task_id
left join {schema}.workflows c on o.kind = 'workflow' and c.id = o.task_id
left join lateral (
    select n.number, n.name, n.state, n.error, n.task_id
    from {schema}.nodes n
    where n.workflow_id = w.id and n.state in ('FAILED', 'CANCELLED', 'EXPIRED')
      and (
          w.success is null
          or exists (
              select from json_array_elements(w.success) c (numbers) cross join json_array_elements_text(c.numbers) r (number)
              where r.number::integer in (n.number, n.member_of)
          )
      )
    order by coalesce(n.member_of, n.number), n.kind = 'map', n.number limit 1
) bad on true
left join {schema}.tasks bt on bt.id = bad.task_id
