"""The built-in cohort: frontal chest films with reports that state what is on them, drawn on demand from a seed.

``cohort`` combines ``cases`` (the table of patients), ``anatomy`` and ``findings`` (body and disease), ``film``
(detector, pixels) and ``reports`` (text). ``questions`` asks about the films. ``files`` writes a cohort to disk.
"""

from fedvlp.data.synthetic.cohort import SyntheticCohort

__all__ = ["SyntheticCohort"]
