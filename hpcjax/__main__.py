"""`python -m hpcjax` is the command `hpcjax`."""

import sys

from hpcjax.runs.cli import main

if __name__ == "__main__":
    sys.exit(main())
