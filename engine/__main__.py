"""Run the engine's command line: `python -m kvscope.engine`.

`python -m engine` in a checkout does the same for one more release.
"""

import sys

if __package__ == "engine":
    print("python -m engine is deprecated: run `kvscope engine` or python -m kvscope.engine", file=sys.stderr)
    # Everything below imports kvscope.engine: without this entry, no module of the engine is loaded under two names.
    sys.modules.pop("engine", None)

from kvscope.engine.command_line import main

sys.exit(main())
