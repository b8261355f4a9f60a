"""`python -m composer` is the command `composer`."""

import sys

from composer.cli import main

sys.exit(main())
