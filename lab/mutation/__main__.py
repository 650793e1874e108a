"""`python -m kvscope.lab.mutation`: run a sample of mutants and print those that survive."""

from __future__ import annotations

from .mutation_run import main

if __name__ == "__main__":
    main()
