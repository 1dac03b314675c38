"""The server's routes, and what stands before and behind them: how bodies get in and answers go out."""
