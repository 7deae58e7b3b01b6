"""`python -m conserved` is the command `conserved`."""

from __future__ import annotations

from conserved.cli import main

if __name__ == "__main__":
    main()
