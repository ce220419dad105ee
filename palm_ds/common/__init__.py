"""Foundations of every package: errors, keyed random numbers, configuration, atomic writes."""
