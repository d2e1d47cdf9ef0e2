"""Which channels of a layer's input stay, from the sums of that input; and better values in closed form, for what takes
them and for the last matrices of experts that stay.

Shape letters: R rows, C columns (input channels), K those of them that are kept or go together, T tokens,
E experts, k those chosen for a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.accuracy.tuning import BatchNumbers
from modelopt_sparse.calibration.stats import add_product, completed
from modelopt_sparse.model.devices import stored
from modelopt_sparse.model.experts import SECOND, Route
from modelopt_sparse.run import Run


def judging_calls(batches: BatchNumbers) -> set[int]:
    """The numbers of this process's calls that judge."""
    return {batches.local[number] for number in batches.held_back if number in batches.local}


# which channels stay --------------------------------------------------------------------------------------------------


SCORE_DAMPING = 1e-3  # of the mean of the Gram matrix's diagonal
CHUNK, CHUNKS = 16, 256  # channels that go at a time: 16, or a 256th of all


def gram_scores(weight_RC: Tensor, gram_CC: Tensor, count: int, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """(indices of the ``count`` channels that stay, ascending; a score for each channel, larger = keep).

    Greedy structured OBS (Hassibi and Stork 1992, for whole columns; ZipLM, Kurtic et al. 2023): the channels go whose
    loss is least when all others make up for them, ``chunk`` at a time; then the others do so. The loss of
    channel j is ||w_j||^2 / [H^-1]_jj, at the time that it goes; of one that stays, at the end.
    """
    columns = weight_RC.shape[1]
    weight, hessian = weight_RC.double(), gram_CC.to(torch.float64, copy=True)
    hessian.diagonal().add_((SCORE_DAMPING * hessian.diagonal().mean()).clamp_min(1e-30))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    del hessian  # as large as the inverse
    scores = torch.zeros(columns, dtype=torch.float64, device=weight.device)
    left = torch.arange(columns, device=weight.device)
    while True:
        losses = weight.square().sum(0) / inverse.diagonal()
        scores[left] = losses
        if len(left) <= count:
            return left, scores
        going = min(max(chunk, columns // CHUNKS), len(left) - count)
        order = losses.argsort(stable=True)
        gone_K, stay = order[:going], order[going:].sort().values
        factor = torch.linalg.cholesky(inverse[gone_K][:, gone_K])
        coefficients = torch.cholesky_solve(inverse[gone_K][:, stay], factor)  # [K, those that stay]
        weight = weight[:, stay] - weight[:, gone_K] @ coefficients
        inverse = inverse[stay][:, stay] - inverse[stay][:, gone_K] @ coefficients
        left = left[stay]


def largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest scores in each row ``[..., C]``, ascending; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[..., :count].sort().values


DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # of the mean of the Gram matrix's diagonal


def least_squares(weight_RC: Tensor, kept_K: Tensor, gram_CC: Tensor, judge_CC: Tensor) -> tuple[Tensor, float, float]:
    """Fit the kept columns so that they make up for the others -> (their values ``[R, K]``, the error with the old
    values, the error with these).

    They are the least squares for the inputs of ``gram_CC``, pulled towards the old values: the solution V of V (G_KK +
    d I) = W (G_CK + d I_CK). The damping d is the one with the least error on the inputs of ``judge_CC``, and the old
    values stay where none of them lowers it. Errors are relative to ||W X||^2.
    """
    weight, gram, judge = weight_RC.double(), gram_CC.double(), judge_CC.double()
    energy = float(((weight @ judge) * weight).sum())

    def error(values: Tensor) -> float:
        rest = weight.index_copy(1, kept_K, weight[:, kept_K] - values)
        return max(float(((rest @ judge) * rest).sum()), 0.0) / energy if energy > 0 else 0.0

    best = weight[:, kept_K]
    as_is = least = error(best)
    mean = gram.diagonal().mean().clamp_min(1e-30)
    for damping in DAMPINGS:
        damped = gram[kept_K][:, kept_K]
        damped.diagonal().add_(damping * mean)
        goal = weight @ gram[:, kept_K] + weight[:, kept_K] * (damping * mean)
        values = torch.cholesky_solve(goal.mT, torch.linalg.cholesky(damped)).mT.to(weight_RC.dtype).double()
        if (new_error := error(values)) < least:
            best, least = values, new_error
    return best.to(weight_RC.dtype), as_is, least


# experts --------------------------------------------------------------------------------------------------------------
# A mixture puts out the sum of g D h over the experts of a token: gate, last matrix, and what that is multiplied with.
# Experts that stay get tokens of those that go. Their D are fitted to what the whole mixture puts out, one after the
# other, each to what the others leave.


SWEEPS = 2


@dataclass
class RoutedCall:
    """The real tokens of one call of a smaller mixture, in call ``number`` of the model in this process.

    residual: ``[T, R]``, the whole mixture's output less the smaller one's. energy: of the former.
    routes, tokens, gates: expert -> its rows, which of the T tokens these are, and their gates ``[rows, 1]`` where they
      scale what it puts out.
    """

    number: int
    residual: Tensor
    energy: float
    routes: dict[int, Route]
    tokens: dict[int, Tensor]
    gates: dict[int, Tensor | float]

    @classmethod
    def of(cls, number: int, module: Any, adapter: Any, inputs: tuple[Tensor, ...], whole_TR: Tensor) -> "RoutedCall":
        """Read the adapter's ``inputs`` of a call of the experts. ``whole_TR``: the output of the whole mixture."""
        _, index_Tk, gates, *_ = inputs
        gates_Tk = (gates if gates.shape == index_Tk.shape else gates.gather(1, index_Tk)).float()
        call = cls(number, whole_TR.float().clone(), float(whole_TR.float().double().square().sum()), {}, {}, {})
        for route in adapter.chosen(inputs, len(stored(module, SECOND))):
            call.routes[route.expert] = route
            call.tokens[route.expert] = route.slots // index_Tk.shape[1]
            call.gates[route.expert] = 1.0 if adapter.gates_inside else gates_Tk.flatten()[route.slots, None]
            rows = adapter.hidden(module, route.expert, route.rows)
            made = adapter.output(module, route.expert, rows).float() * call.gates[route.expert]
            call.subtract_output(route.expert, made)
        return call

    def subtract_output(self, expert: int, added: Tensor) -> None:
        """Take what an expert puts out, or puts out more, ``[tokens, R]``, from the residual."""
        self.residual.index_add_(0, self.tokens[expert], added, alpha=-1)


def refit_experts(
    module: Any, adapter: Any, calls: Sequence[RoutedCall], batches: BatchNumbers, run: Run
) -> tuple[Tensor, list[float]]:
    """(the last matrices of the experts of a smaller mixture, shaped like its parameter, with values that make up for
    those that have gone; [the error as is, the error of these], relative, on the batches that judge).

    ``module`` holds the experts of the smaller mixture. None gets values that are worse on the batches that judge.
    """
    judging = judging_calls(batches)
    old = stored(module, SECOND).detach()
    matrices_ERC = adapter.matrix(module, old).float().clone()

    def measure(number: int) -> tuple[float, float]:
        same = [call for call in calls if call.number == number]
        return sum(float(call.residual.double().square().sum()) for call in same), sum(call.energy for call in same)

    errors = [batches.validation_error(measure)]
    for expert in [*range(len(matrices_ERC))] * SWEEPS:
        routed = [call for call in calls if expert in call.routes]
        seen = [adapter.hidden(module, expert, x.routes[expert].rows).float() * x.gates[expert] for x in routed]
        sums: dict[bool, Tensor] = {}  # of the calls that judge, and of the others
        for call, rows in zip(routed, seen):
            judges, both = call.number in judging, torch.cat([rows, call.residual[call.tokens[expert]]], dim=1)
            sums[judges] = add_product(sums.get(judges), both)
        sums = {judges: completed(gram) for judges, gram in sums.items()}
        grams = run.processes.sum_by_key("statistics", sums, matrices_ERC.device)
        change = _change(grams.get(False), grams.get(True), matrices_ERC.shape[-1])
        if change is not None:
            matrices_ERC[expert] += change
            for call, rows in zip(routed, seen):
                call.subtract_output(expert, rows @ change.mT)
    return adapter.unmatrix(module, matrices_ERC).to(old.dtype), [*errors, batches.validation_error(measure)]


def _change(fitted: Tensor | None, judging: Tensor | None, columns: int) -> Tensor | None:
    """Fit the change ``[R, C]`` of a matrix that leaves the least residual; None if none lowers it.

    Gram matrices are ``[C + R, C + R]``, of what the matrix is multiplied with and the residual. The change is the
    least squares for those that it is fitted to, pulled towards 0; the damping is the one with the least error for
    those that judge.
    """
    if fitted is None or judging is None or not float(fitted.diagonal()[:columns].sum()) > 0:
        return None
    fitted, judging = fitted.double(), judging.double()
    among, eye = fitted[:columns, :columns], torch.eye(columns, dtype=fitted.dtype, device=fitted.device)
    best, least = None, 0.0
    for damping in DAMPINGS:
        factor = torch.linalg.cholesky(among + eye * (damping * among.diagonal().mean()))
        change = torch.cholesky_solve(fitted[:columns, columns:], factor).mT
        new_error = float(
            ((change @ judging[:columns, :columns]) * change).sum()
            - 2 * (change.mT * judging[:columns, columns:]).sum()
        )
        if new_error < least:
            best, least = change.float(), new_error
    return best
