"""Workloads, engine models and reports for the simulated cluster."""
