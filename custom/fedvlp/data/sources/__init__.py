"""Data sets as published, each read by one file."""
