"""Live and simulated clusters that drive the scheduler through time, and the journal of its steps."""
