"""Run the `monitor` command: `python -m kvscope.monitor`.

`python -m monitor` in a checkout does the same for one more release.
"""

import sys

if __package__ == "monitor":
    print("python -m monitor is deprecated: run `monitor` or python -m kvscope.monitor", file=sys.stderr)
    # Everything below imports kvscope.monitor: without this entry, no module of it is loaded under two names.
    sys.modules.pop("monitor", None)

from kvscope.monitor.cli import main

sys.exit(main())
