"""`python -m sympow`: the command line."""

import sys

from sympow.cli import main

sys.exit(main())
