"""Parts of benchmark_deadlines.py: shares of deadlines met, live and simulated."""
