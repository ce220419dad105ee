"""Raw text to a corpus: `python launch/prepare.py OUT INPUT...`; --help says the rest."""

from palm_ds.corpus.cli import main
from palm_ds.errors import exit_on_user_error

if __name__ == "__main__":
    with exit_on_user_error():
        main()
