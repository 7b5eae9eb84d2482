"""Federated medical vision-language pre-training on NVIDIA FLARE: the front door.

>>> from fedvlp import RunFolder, load_model, presets, simulate  # doctest: +SKIP

Each name is imported when it is first asked for, so that ``import fedvlp`` costs nothing.
"""

from typing import TYPE_CHECKING

from fedvlp.core import names

if TYPE_CHECKING:  # what __getattr__ finds, for type checkers and editors
    from fedvlp.core.method import Method as Method
    from fedvlp.data.cohort import Cohort as Cohort
    from fedvlp.federation.codec import Wire as Wire
    from fedvlp.federation.loop import Rounds as Rounds
    from fedvlp.run import presets as presets
    from fedvlp.run.experiment import Experiment as Experiment
    from fedvlp.run.experiment import Partition as Partition
    from fedvlp.run.folder import RunFolder as RunFolder
    from fedvlp.run.model_use import load_model as load_model
    from fedvlp.run.simulate import simulate as simulate
    from fedvlp.training.settings import Training as Training

__version__ = "0.1.0"
__getattr__, __dir__ = names.lazy(__name__)
