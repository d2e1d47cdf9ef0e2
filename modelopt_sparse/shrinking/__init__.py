"""Fewer MLP channels, blocks and experts: a smaller plain model."""
