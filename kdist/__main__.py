"""`python -m kdist`: the command line."""

import sys

from kdist.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
