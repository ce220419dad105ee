"""One file per encoder that is not a transformer; a recipe names it by its file: `kind: cnn`."""
