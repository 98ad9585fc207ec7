"""`python -m sympow.cli`, the same as `python -m sympow`."""

import sys

from sympow.cli import main

sys.exit(main())
