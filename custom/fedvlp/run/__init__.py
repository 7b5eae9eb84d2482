"""Experiments: what they are, how they are put together, run and evaluated, and the folder that they leave."""
