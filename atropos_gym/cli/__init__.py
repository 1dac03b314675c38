"""The ``atropos-gym`` command: one file a verb."""
