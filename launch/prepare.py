"""`palm-ds prepare` from a checkout: `python launch/prepare.py --help` has examples."""

from palm_ds.cli.prepare import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
