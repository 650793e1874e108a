"""`python -m tests.mutation`: run a sample of mutants and print those that survive."""

from __future__ import annotations

from tests.mutation.mutation_run import main

if __name__ == "__main__":
    main()
