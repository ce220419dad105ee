"""`palm-ds suite` from a checkout: `python launch/suite.py --help` has examples."""

from palm_ds.cli.suite import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
