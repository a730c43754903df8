"""`everbeat demo`: three trees of workers count real source code while they are killed and frozen.

What lives here: all of it; `command` is the way in. What may not, in this file: imports, since workers that only want
`tasks` come through here.
"""
