"""`palm-ds report` from a checkout: `python launch/report.py --help` has examples."""

from palm_ds.cli.report import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
