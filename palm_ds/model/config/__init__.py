"""An encoder's configuration, activations and kinds; modules without memory."""
