"""Jobs of lines beside bursts of online requests: one workload, this project's scheduler and its rivals."""
