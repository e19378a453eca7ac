"""Optimizers, their schedules and loss scaling; each right on a sharded model."""
