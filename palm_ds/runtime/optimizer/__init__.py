"""Optimizers, parameter groups, gradient norms."""
