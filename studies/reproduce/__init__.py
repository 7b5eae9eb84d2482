"""`fedvlp reproduce`: the papers' tables, cell by cell, with the printed values beside (docs/reproduce.md)."""
