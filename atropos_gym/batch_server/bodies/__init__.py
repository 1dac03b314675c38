"""Bodies in and answers out: content codings, JSON and msgpack, and what is wrong with a body."""
