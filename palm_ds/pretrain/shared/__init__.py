"""Code shared by pretraining tasks; the modules here are not tasks."""
