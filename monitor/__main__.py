"""`python -m kvscope.monitor` is `monitor`."""

import sys

from kvscope.monitor.cli import main

sys.exit(main())
