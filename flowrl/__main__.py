"""Run the command line: `python -m flowrl train ppo`."""

import sys

from flowrl.cli.main import main

sys.exit(main())
