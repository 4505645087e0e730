"""Numbers to tables: bin edges and, on them, the theory and control of batching. numpy only."""
