"""`python -m chunkwise.cli`."""

from . import main

main()
