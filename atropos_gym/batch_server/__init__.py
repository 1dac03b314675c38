"""The batch server: scored groups in, exact batches out, over the Atropos rollout API."""
