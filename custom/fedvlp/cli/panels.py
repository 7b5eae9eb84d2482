"""Under which heading `fedvlp --help` lists a command."""

TRAIN, JUDGE, USE, HOSPITALS, EXTEND = "Train", "Compare and judge", "Use a model", "Data and hospitals", "Extend"
