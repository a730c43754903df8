"""The page functions. Each returns a record of its page, of which `web.rendering` makes HTML or JSON."""
