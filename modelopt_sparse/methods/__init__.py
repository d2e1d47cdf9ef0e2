"""The methods by name. A new one is one file and one line here."""

from modelopt_sparse.methods.alps import ALPS
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.magnitude import Magnitude
from modelopt_sparse.methods.ria import RIA
from modelopt_sparse.methods.sparsegpt import SparseGPT
from modelopt_sparse.methods.wanda import Wanda

METHODS: dict[str, Method] = {method.name: method for method in (Magnitude(), Wanda(), RIA(), SparseGPT(), ALPS())}
ALIASES = {"sparse_magnitude": "magnitude"}  # ModelOpt's name
