-- Whether the user's connection is still in the transaction that was marked.
select coalesce(current_setting('everbeat.commit', true), '') = %(mark)s as is_marked
