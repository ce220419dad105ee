"""TensorFlow BERT checkpoints."""
