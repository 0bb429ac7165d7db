"""`python -m cupymla`; see `cupymla.cli`."""

import sys

from .cli import main

sys.exit(main())
