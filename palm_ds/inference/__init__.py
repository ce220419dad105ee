"""Trained models in use: prediction, scoring, filling masks."""
