"""What the engine is made of: processes, DeepSpeed configuration, optimizers, checkpoints."""
