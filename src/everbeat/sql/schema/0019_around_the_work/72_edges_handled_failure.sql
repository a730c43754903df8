-- For an edge without `if_failed`, this trigger costs only the comparison of one column.
create trigger edges_handled_failure before update of state on {schema}.edges
    for each row when (new.if_failed and old.state = 'OPEN' and new.state <> 'OPEN') execute function {schema}.judge_handled_failure()
