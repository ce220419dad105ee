"""`palm-ds inspect` from a checkout: `python launch/inspect_stream.py --help` has examples."""

from palm_ds.cli.inspect import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
