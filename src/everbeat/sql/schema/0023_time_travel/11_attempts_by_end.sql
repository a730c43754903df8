-- Finds the shorter attempts that ended within a second after a moment. Rows are stored in the order in which attempts end, so a summary of
-- each group of pages is enough. It holds several intervals, because pages that retention has emptied are filled with newer rows.
create index {concurrently} attempts_by_end on {schema}.attempts using brin (ended_at timestamptz_minmax_multi_ops)
    with (pages_per_range = 32, autosummarize = on)
