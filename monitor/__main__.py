"""Run the `monitor` command: `python -m kvscope.monitor`."""

import sys

from .terminal.cli import main

sys.exit(main())
