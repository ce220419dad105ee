"""`palm-ds ablate` from a checkout: `python launch/ablate.py --help` has examples."""

from palm_ds.cli.ablate import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
