"""Calibration: data, statistics and the walk through a model's blocks."""
