"""What was done and measured, as values, and how they are shown."""
