"""Make report.html of a run folder, at any time: of a run that goes on, was killed, or is done.

python launch/report.py runs/demo/run
"""

from __future__ import annotations

import argparse
import sys

from palm_ds.errors import exit_on_user_error
from palm_ds.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", nargs="+", help="the --run_dir of launch/pretrain.py")
    with exit_on_user_error():
        for folder in parser.parse_args().run_dir:
            print(write_report(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
