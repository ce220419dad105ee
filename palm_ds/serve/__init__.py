"""An HTTP server for trained models: many clients' texts in one forward pass."""
