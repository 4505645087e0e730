"""Parts of benchmark_deadlines.py: deadlines kept, live and simulated."""
