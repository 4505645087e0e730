"""The handle: bodies that drive the scheduler through time, and the journal of what it said."""
