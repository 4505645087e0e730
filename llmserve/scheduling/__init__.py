"""The scheduler: a pure state machine from events to actions."""
