"""The report page of a run (``page.write``): ``sections`` has its short ones."""
