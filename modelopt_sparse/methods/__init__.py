"""The methods by name. A new one is one file and one line here."""

from modelopt_sparse.methods.alps import ALPS
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.scores import RIA, Magnitude, Wanda
from modelopt_sparse.methods.sparsegpt import SparseGPT

METHODS: dict[str, Method] = {method.name: method for method in (Magnitude(), Wanda(), RIA(), SparseGPT(), ALPS())}
ALIASES = {"sparse_magnitude": "magnitude"}  # ModelOpt's name
