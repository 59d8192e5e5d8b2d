"""``python -m pagedkv``: the same as the console script."""

import sys

from pagedkv.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
