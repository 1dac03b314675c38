"""Bodies read and answers formed: content codings, JSON and msgpack, and what is wrong with a body."""
