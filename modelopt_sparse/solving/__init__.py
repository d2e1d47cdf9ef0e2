"""From the statistics of a group of layers to their solutions."""
