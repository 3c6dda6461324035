"""``python -m repo_service.cli`` is ``kvgraft``."""

import sys

from repo_service.cli.main import main

sys.exit(main())
