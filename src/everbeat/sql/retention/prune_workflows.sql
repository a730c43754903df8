-- Delete old ended workflows with their nodes, edges, signals and labels: one step of a scan of the primary key. A workflow that is a node of a
-- live workflow is kept. A step deletes old workflows up to a total number of nodes, but at least one workflow if any is old. Return the
-- position at which the next step begins, or null at the end.
with looked as materialized (
    select w.id from {schema}.workflows w
    where w.id > %(after)s and w.id < %(until)s
    order by w.id
    limit %(limit)s
), old as materialized (
    select w.id, w.node_count
    from {schema}.workflows w
    where w.id = any(array(select l.id from looked l)) and w.ended_at < statement_timestamp() - %(hours)s * interval '1 hour'
      and not exists (select from {schema}.workflows p where p.id = w.parent_id and p.ended_at is null)
    order by w.id
    for update skip locked
), counted as materialized (
    select o.id, sum(o.node_count) over (order by o.id) - o.node_count as before from old o
), fit as materialized (
    select c.id from counted c where c.before < %(limit)s
), gone as (
    delete from {schema}.workflows w where w.id = any(array(select f.id from fit f)) returning w.id
), gone_nodes as (
    delete from {schema}.nodes n where n.workflow_id = any(array(select g.id from gone g)) returning 1
), gone_edges as (
    delete from {schema}.edges e where e.workflow_id = any(array(select g.id from gone g)) returning 1
), gone_labels as (
    delete from {schema}.labels l where l.id = any(array(select g.id from gone g))
), gone_signals as (
    delete from {schema}.signals s where s.target = any(array(select g.id from gone g)) returning 1
)
select
    case
        when exists (select from counted c where c.before >= %(limit)s) then (select f.id from fit f order by f.id desc limit 1)
        when (select count(*) from looked) = %(limit)s then (select l.id from looked l order by l.id desc limit 1)
    end as next_after,
    (select count(*) from gone) as workflows, (select count(*) from gone_nodes) as nodes, (select count(*) from gone_edges) as edges,
    (select count(*) from gone_signals) as signals
