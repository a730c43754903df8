"""The settings that everbeat gives to each of its sessions on the server, in place of those of the role and the database."""

from __future__ import annotations

from typing import Final

# Without the first five, our statements would go wrong: rows locked while others change them would be read anew, dates could not be
# read (near the year 10000 in no other zone), an idle session would be ended, and NULL in a list would be a text.
# The others bound what a frozen or lost client leaves on the server. A transaction without a statement for 10 s is rolled back: no
# pause of our own code is as long, and the step is repeated. A statement ends when its client's socket is closed (only Linux servers
# can check that), and a session ends when its network is silent (no effect on Unix sockets).
# Behind a transaction pooler, this sets nothing and returns false: the settings would leak to other clients. The second parameter
# says that the pooler keeps one session for each client.
OWN_SETTINGS: Final = b"""
select pg_backend_pid(), 0 < (
    select count(set_config(own.name, own.value, false))
    from (values
        ('default_transaction_isolation', 'read committed'), ('DateStyle', 'ISO'), ('TimeZone', 'UTC'), ('idle_session_timeout', '0'),
        ('array_nulls', 'on'), ('idle_in_transaction_session_timeout', '10s'),
        ('client_connection_check_interval', case when version() like '%%linux%%' then '2s' else '0' end),
        ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'), ('tcp_user_timeout', '10s')
    ) as own (name, value)
    where pg_backend_pid() = %s or %s
)
"""

BOUND_TRANSACTION: Final = b"set local idle_in_transaction_session_timeout = '10s'"
"""The same bound for one transaction, behind a transaction pooler."""

PATIENT_KEEPALIVES: Final = b"""
    set tcp_keepalives_idle = 60; set tcp_keepalives_interval = 120; set tcp_keepalives_count = 127; set tcp_user_timeout = 0"""
"""For the session that holds a supervisor's session lock. The server must end this session only when its socket was closed, never
because the network is silent: observers take the end of the lock for a death, and a silent network is none. So there are as many probes as Linux
allows. A host that was started again answers one within two minutes, and the server then ends the session of its former life."""
SILENCE_KEPT_MS: Final = 4 * 3_600_000
"""The server keeps that session at least this long when the network is silent: 60 s and 127 probes 120 s apart are 4 h 15 min."""
