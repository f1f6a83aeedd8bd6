"""`python -m headrace.testing.acceptance`."""

import sys

from headrace.testing.acceptance import main

sys.exit(main())
