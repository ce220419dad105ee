"""Parts of the engine: processes, DeepSpeed configuration, optimizers, checkpoints."""
