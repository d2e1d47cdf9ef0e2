"""Checkpoints larger than memory: shard in, shard out, and runs that go on where they were stopped."""
