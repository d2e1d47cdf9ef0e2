"""From calibration data to the statistics of layers' inputs, block by block."""
