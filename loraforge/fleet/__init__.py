"""Fleets of PEFT LoRA adapters: reading, locking, shapes and training."""
