"""Version 2 of the shop, as its workers run it."""

from __future__ import annotations

from shop import Shop  # type: ignore[import-not-found]  # a program stands beside it

app = Shop(2).app
