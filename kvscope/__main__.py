"""Run the `kvscope` command: `python -m kvscope`."""

import sys

from kvscope.command import main

sys.exit(main())
