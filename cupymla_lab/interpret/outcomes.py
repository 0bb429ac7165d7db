"""What an instruction's handler returns when it is not simply done, which is None."""

BLOCK = 1
"""Not executed: other threads have to come first. It is tried again."""

YIELD = 2
"""Executed, but in vain, as a poll that found nothing: others should run."""
