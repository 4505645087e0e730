"""BatchMonitor and BatchDispatcher."""
