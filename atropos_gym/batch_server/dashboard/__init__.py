"""The page that people look at while a run goes on: what waits, what moves, and what was said.

It only watches. ``history`` counts what comes and goes, ``gallery`` keeps the latest groups, ``reason`` says
in a sentence why nothing moves, ``page`` is the page itself; ``watch`` puts them together. All of it is
bounded, and the store is never changed from here.
"""

from __future__ import annotations

from atropos_gym.batch_server.dashboard.watch import Dashboard

__all__ = ["Dashboard"]
