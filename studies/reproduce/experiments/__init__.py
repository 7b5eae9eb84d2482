"""The experiments behind the papers' tables: every cell of a study, at each size.

Cells that the ledger knows have its names, so that its claims are judged of a table that has both of their methods.
"""
