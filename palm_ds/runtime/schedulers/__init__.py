"""Runs handed to a cluster's own scheduler: Slurm or Kubernetes. The shipped files are filled in,
submitted with the scheduler's program, and their logs followed; nothing is scheduled here."""
