"""Operators: one folder each, the same file names in every folder; see `registry.OPERATORS`."""
