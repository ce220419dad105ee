"""What every package stands on: errors, keyed random numbers, configuration, atomic writes."""
