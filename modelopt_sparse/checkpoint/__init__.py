"""Folders of sparse models: save, restore, verify, and checkpoints larger than memory."""
