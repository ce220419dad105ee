"""`palm-ds download` from a checkout: `python launch/download.py --help` has examples."""

from palm_ds.cli.download import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
