"""The mind: a pure state machine that is told events and answers with actions."""
