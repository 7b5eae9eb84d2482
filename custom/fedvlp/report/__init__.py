"""The report page of a run (``page.write``): a file for each section."""
