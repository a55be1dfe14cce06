"""Run a command of Python several times in one process, which has to import it only once.

``python repeat.py MODULE:FUNCTION`` reads from standard input a JSON list of arguments, the command's name first,
from each line.
"""

import importlib
import json
import sys

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    main = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        sys.argv = json.loads(line)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
