"""`python -m cupymla`; see `cupymla.cli`."""

from .cli import main
from .cli.terminal import exit_with

exit_with(main)
