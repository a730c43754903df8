-- Judge the gates once that an early copy of version 15 has not judged.
update {schema}.limits
set version = greatest(1, version), changed_at = coalesce(changed_at, clock_timestamp()), has_old_gates = true,
    has_old_lines = has_old_lines or version = 0
where not has_old_gates
