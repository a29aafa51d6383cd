"""`python -m longhelix`."""

import sys

from longhelix.cli.main import main

sys.exit(main())
