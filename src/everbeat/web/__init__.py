"""The dashboard: an ASGI app that shows the tasks, the workers and what became of them, and lets operators act.

`Web(app, auth=...)` can be mounted in another ASGI app, and `everbeat web` serves it. Install everbeat with the extra `web`.
"""

from everbeat.web.application import Web as Web
from everbeat.web.rights import Authentication as Authentication
from everbeat.web.rights import Basic as Basic
from everbeat.web.rights import Loopback as Loopback
from everbeat.web.rights import Role as Role
from everbeat.web.rights import TrustedHeader as TrustedHeader
from everbeat.web.rights import User as User
