"""`palm-ds predict` from a checkout: `python launch/predict.py --help` has examples."""

from palm_ds.cli.predict import COMMAND

main = COMMAND.main

if __name__ == "__main__":
    COMMAND.start()
