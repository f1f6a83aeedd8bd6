"""`python -m headrace.integrations.runai PROGRAM [ARGUMENT ...]`: run a program, with runai_model_streamer being this package."""

from __future__ import annotations

import os
import runpy
import sys

from headrace.integrations.runai._install import install


def main(arguments: list[str]) -> int:
    """Run the program that the arguments name, as `python PROGRAM` would."""
    if not arguments:
        print("usage: python -m headrace.integrations.runai PROGRAM [ARGUMENT ...]", file=sys.stderr)  # noqa: T201
        return 2
    install()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
