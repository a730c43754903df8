-- Judge all gates and lines once, because a change of a limit could leave lines waiting before this version.
update {schema}.limits set version = 1, changed_at = clock_timestamp(), has_old_gates = true, has_old_lines = true where version = 0
