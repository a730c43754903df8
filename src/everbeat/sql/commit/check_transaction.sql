-- Return whether the user's connection is still in the marked transaction.
select coalesce(current_setting('everbeat.commit', true), '') = %(mark)s as is_marked
