"""A `monitor` command whose threads can be killed: `python -m tests.threads_process serve …`.

A line on its standard input, `WORKER<tab>EXCEPTION`, throws that exception into the thread of that worker, as a lack of
memory or a careless library would. Each line is answered with the names of the threads, as JSON.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import sys
import threading

from kvscope.monitor.terminal.cli import main


def obey() -> None:
    for line in sys.stdin:
        worker, _, exception = line.rstrip("\n").partition("\t")
        threads = {thread.name: thread.ident or 0 for thread in threading.enumerate()}
        ident = threads.get(f"kvscope {worker}")
        if ident:  # it may have ended just now, and not run again yet
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(getattr(builtins, exception))
            )
        print(json.dumps(sorted(threads)), flush=True)


if __name__ == "__main__":
    threading.Thread(target=obey, name="killer", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
