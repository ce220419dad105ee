"""palm_ds: multi-task pretraining and fine-tuning of text encoders on a DeepSpeed engine."""

__version__ = "0.1.0"
