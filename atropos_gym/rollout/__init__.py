"""Playing: episodes, groups, evaluation, writers and the environment service."""
