"""The built-in cohort: frontal chest films with reports that state what is on them, drawn on demand from a seed.

``cohort`` puts together ``cases`` (who has what), ``anatomy`` and ``findings`` (body and disease), ``film``
(detector, batches) and ``reports`` (words); ``files`` writes it to disk.
"""

from fedvlp.data.synthetic.cohort import SyntheticCohort

__all__ = ["SyntheticCohort"]
