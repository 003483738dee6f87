"""`python -m hybrid5d`."""

from hybrid5d.cli import main

main()
