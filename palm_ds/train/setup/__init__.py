"""From a recipe to the data, model and run folder; checks before the first step."""
