"""`python -m kdist`: the command line."""

import sys

from kdist.command_line import main

if __name__ == "__main__":
    sys.exit(main())
