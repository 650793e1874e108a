"""Run the engine's command line: `python -m kvscope.engine`."""

import sys

from .command_line import main

sys.exit(main())
