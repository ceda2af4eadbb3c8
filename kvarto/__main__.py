"""`python -m kvarto` is `kvarto`."""

from kvarto.cli.main import main

main()
