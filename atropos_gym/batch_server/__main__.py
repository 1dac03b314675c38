"""Runs the batch server: ``python -m atropos_gym.batch_server --port 8000``."""

from __future__ import annotations

import sys

from atropos_gym.batch_server.serve import main

if __name__ == "__main__":
    sys.exit(main())
