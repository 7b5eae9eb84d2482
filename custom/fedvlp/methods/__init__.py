"""One file per federated method, and the registry that names them."""

from fedvlp.core.method import Method
from fedvlp.methods.centralized import Centralized
from fedvlp.methods.fedavg import FedAvg
from fedvlp.methods.feddra import FedDRA
from fedvlp.methods.fedprox import FedProx
from fedvlp.methods.fedrgb import FedRGB
from fedvlp.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": Local,
    "centralized": Centralized,
    "feddra": FedDRA,
    "fedrgb": FedRGB,
}
