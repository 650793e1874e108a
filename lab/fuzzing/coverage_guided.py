"""Feeds a reader input that is chosen by the code it reaches: libFuzzer over Python, by atheris.

    python -m kvscope.lab.fuzzing.coverage_guided frame --inputs 20000 --seed 1

The corpus begins with the target's real input. Half of the changes are libFuzzer's own, half those of mutations.py,
which keep checksums and packing. Exits with 0 if nothing escaped, else with libFuzzer's own code, and prints the input.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["kvscope.monitor"]):
    from . import mutations
    from .target_table import TARGETS

DAMAGE: Final[dict[str, Callable[[Sequence[bytes], random.Random], bytes]]] = {
    "frame": mutations.damaged_frame,
    "journal": mutations.damaged_segment,
    "bundle": mutations.damaged_archive,
}
HANG_S: Final = 20
"""By the clock, which libFuzzer counts, with instrumented code on a busy machine."""


def main() -> None:
    """Run one target. libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=DAMAGE)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=0, help="0: until all inputs were read")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31))
    given = parser.parse_args()
    logging.disable()
    os.environ.pop("KVSCOPE_VALIDATE", None)
    with tempfile.TemporaryDirectory(prefix="kvscope-guided-") as folder:
        reader = TARGETS[given.target](Path(folder), ())
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, content in enumerate(reader.inputs):
            (corpus / str(number)).write_bytes(content)
        damage = DAMAGE[given.target]

        def changed(data: bytes, max_size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if rng.random() < 0.5:
                mutated: bytes = atheris.Mutate(data, max_size)
                return mutated
            try:
                return damage([data], rng)[:max_size]
            except Exception:  # too damaged to be taken apart
                return mutations.damaged_bytes([data], rng)[:max_size]

        arguments = [sys.argv[0], f"-runs={given.inputs}", f"-seed={given.seed}", f"-timeout={HANG_S}"]
        arguments += [f"-max_len={mutations.INPUT_BYTES}", "-rss_limit_mb=2048", "-print_final_stats=1"]
        arguments += [f"-max_total_time={given.seconds}", f"-artifact_prefix={folder}/", str(corpus)]
        atheris.Setup(arguments, reader.read, custom_mutator=changed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
