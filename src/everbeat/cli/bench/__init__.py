"""`everbeat bench`: how fast and how dear everbeat is on this machine, each figure beside what the bare server does in the same run.

    command     what is asked for, and the report
    figures     a figure: its repeats, its ratio, its target
    ceiling     what the server does without everbeat
    sends, drains, idle, deaths
                one kind of measurement each
    told        workers told by PostgreSQL and by NATS, side by side; sender is a program that sends
    crew        the workers that are measured
    program     their task functions; nats_program the same, told by NATS
    environments, contest
                other queues, each in an environment and a database of its own
    peers       their adapters, which are programs of their own

What may not live here: shortcuts that a user would not have. Everything goes through the public API.
"""
