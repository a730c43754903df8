-- If only live tasks are listed, the states are an indexed filter as well, and the planner leaves `history` out.
%(is_live)s::boolean is not true or t.state = any(%(states)s::text[])
