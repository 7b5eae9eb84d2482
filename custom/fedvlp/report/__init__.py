"""The report page of a run: one file for each section."""
