"""Measurements: each verifies, warms up, times rivals in turn, prints a table and writes JSON under bench/results/."""
