"""Test kit: cases, comparison, timing, evidence and reports."""
