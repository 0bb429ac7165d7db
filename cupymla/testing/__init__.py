"""Test kit: comparison, poison, GPU runs, timing, evidence and reports. It ships, so that users can check their GPU."""
