"""A clock that gives the times that a test names, for the rule that decides by them."""

import torch
import torch.nn.functional as F

from modelopt_sparse.runtime import kernels as backends
from modelopt_sparse.runtime.kernels import Algorithm

FAST, OTHER = Algorithm(7, 1, -1), Algorithm(3, 4, 2)


class Stopwatch:
    """A timer that knows what it is given: seconds by (the product's kind, library, tokens, algorithm)."""

    def __init__(self, sparse: dict[tuple[int, Algorithm], float], dense: dict[tuple[int, str], float]) -> None:
        self.sparse, self.dense = sparse, dense
        self.asked: list[tuple] = []
        self.sets: list[int] = []

    def __call__(self, calls) -> float:
        call = calls[0]
        self.sets.append(len(calls))
        assert len({argument.data_ptr() for argument in (each.args[1] for each in calls)}) == len(calls)
        x = call.args[0]
        assert torch.isfinite(call()).all()
        if call.func is F.linear:
            key = (len(x), str(torch.backends.cuda.preferred_blas_library()))
            self.asked.append(("dense", *key))
            return self.dense[key]
        algorithm = Algorithm(*call.keywords["choices"][1:])
        self.asked.append(("sparse", len(x), algorithm))
        return self.sparse[len(x), algorithm]


TABLE = {
    "sparse": {(1, backends.DEFAULT): 9e-6, (1, FAST): 8e-6, (64, backends.DEFAULT): 5e-6, (64, FAST): 6e-6},
    "dense": {(1, "cublas"): 10e-6, (1, "cublaslt"): 12e-6, (64, "cublas"): 9e-6, (64, "cublaslt"): 8e-6},
}
