"""``python -m atropos_gym`` is the ``atropos-gym`` command."""

from __future__ import annotations

import sys

from atropos_gym.cli import main

if __name__ == "__main__":
    sys.exit(main())
