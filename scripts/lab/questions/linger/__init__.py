"""Whether a slot should wait for the next request of the session that it has just served (docs/results/linger.md)."""
