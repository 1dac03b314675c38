"""Rewards: pure functions on strings."""
