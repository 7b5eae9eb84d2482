"""The synthetic cohort: frontal chest X-rays with reports that state what is on them, drawn on demand from a seed.

``cohort`` combines ``cases`` (the table of patients), ``anatomy`` and ``findings`` (body and disease), ``film``
(detector, pixels) and ``reports`` (text). ``questions`` asks about the images. ``files`` writes a cohort to disk.
``latent`` is another cohort, of vectors in place of images and words in place of sentences.
"""

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

__all__ = ["SyntheticCohort"]
