"""`python -m jaxkern.models.command_line`."""

import sys

from jaxkern.models.command_line.main import main

sys.exit(main())
