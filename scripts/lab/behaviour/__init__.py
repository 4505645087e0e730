"""The parts of compare_behaviour.py: the requests (asking), the servers (arrangements), and what may differ (masks)."""
