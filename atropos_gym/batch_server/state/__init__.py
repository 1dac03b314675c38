"""What the server knows: the queue, leases, environments, policy; in memory, and in a file beside it."""
