"""The claims of the five papers: scenarios that can show them, cells that are run or resumed, verdicts, a page."""
