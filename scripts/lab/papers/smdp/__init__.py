"""SMDP-based dynamic batching, journal and conference version."""
