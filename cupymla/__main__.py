"""`python -m cupymla`; see `cupymla.cli`."""

from .cli import run

run()
