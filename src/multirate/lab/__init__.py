"""What measures and compares: benchmarks, evaluation, inspection, calibration and baselines.

The product never imports it; its commands load it when they run.
"""
