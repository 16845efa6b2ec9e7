"""`python -m autobatch` is the command `autobatch`."""

from autobatch.cli import main

if __name__ == "__main__":
    main()
