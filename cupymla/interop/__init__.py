"""Bridges to frameworks, imported on demand and never by the core."""
