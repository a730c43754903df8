"""Version 2 of the shop: what its workers run."""

from __future__ import annotations

from shop import Shop  # type: ignore[import-not-found]  # a program stands beside it

app = Shop(2).app
