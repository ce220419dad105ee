"""`palm-ds evaluate` from a checkout: `python launch/evaluate.py --help` has examples."""

from palm_ds.cli.evaluate import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
