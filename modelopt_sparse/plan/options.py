"""Every option of `sparsify`, checked before any work: the layers that globs mean, rules for them, ModelOpt's names for
options, and what each ``quality=`` stands for."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from accelerate.utils import convert_file_size_to_int
from torch.utils.data import Dataset

from modelopt_sparse.checks import Stream, check_number, check_options, check_whole, is_whole, plain_number, shown
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.methods.scores import GivenMask
from modelopt_sparse.model.devices import widens
from modelopt_sparse.model.hf import default_batch_size
from modelopt_sparse.model.output import Divergence, Which, name_of
from modelopt_sparse.plan.budget import (
    AUTO,
    DENSE,
    LEVELS,
    MAX_BUDGET_SPARSITY,
    Budget,
    parse_budget,
    parse_choices,
    zeros_of,
)
from modelopt_sparse.reports.text import nearest, refuse_no_folder, refuse_unknown
from modelopt_sparse.reports.values import DIVERGENCES

# globs ----------------------------------------------------------------------------------------------------------------


def first_match(name: str, globs: Iterable[str]) -> str | None:
    """The first of the globs that matches a name, in upper and lower case; None if none does."""
    return next((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), None)


def check_globs(globs: Iterable[str], names: Sequence[str], kind: str, dense: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a glob that matches none of the names.

    kind: what has these names, such as "layer of this LlamaForCausalLM".
    dense: other names that a user may think of -> why they are not among ``names``.
    """
    for glob in globs:
        if not fnmatch.filter(names, glob):
            reasons = sorted({why for name, why in (dense or {}).items() if first_match(name, [glob])})
            only = f", only weights that stay dense: {'; '.join(reasons)}" if reasons else ""
            close = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3] or ["(there is none)"]
            raise ValueError(f"{glob!r} matches no {kind}{only}; names look like {', '.join(close)}")


# rules ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Options for the layers that a glob matches. Of several rules that match a layer the first one counts.

    glob: a glob of layer names, such as "model.layers.*.mlp.*".
    options: "method", "pattern" and options of the method, for these layers alone; None leaves them dense.
    type_name: name of a class that the layer's module must be an instance of; None: any.
    """

    glob: str
    options: Mapping[str, Any] | None
    type_name: str | None = None

    def matches(self, name: str, module: torch.nn.Module) -> bool:
        """Whether the rule applies to the layer ``name``, whose weight ``module`` holds."""
        type_matches = self.type_name is None or self.type_name in (base.__name__ for base in type(module).__mro__)
        return type_matches and fnmatch.fnmatchcase(name, self.glob)


def parse_rules(rules: Any) -> tuple[Rule, ...]:
    """Rules from ``{glob: options}``, ``{class: {glob: options}}`` (ModelOpt), or a list of (glob, options) or Rules.

    Raises TypeError or ValueError for anything else.
    """
    if isinstance(rules, Mapping):
        if any(str(key).startswith("nn.") for key in rules):
            return class_rules(rules)
        rules = list(rules.items())
    return tuple(map(_as_rule, rules if isinstance(rules, Iterable) else [rules]))


def _as_rule(pair: Any, type_name: str | None = None) -> Rule:
    rule = pair
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        glob, options = pair
        rule = Rule(glob, options, type_name)
    if isinstance(rule, Rule) and isinstance(rule.glob, str) and isinstance(rule.options, Mapping | None):
        return rule
    form = "a glob of layer names with a mapping of options, or None (dense), such as {'*.q_proj': {'pattern': '2:4'}}"
    raise TypeError(f"rule {shown(pair)}: a rule is {form}")


# ModelOpt -------------------------------------------------------------------------------------------------------------

# ModelOpt's keys -> ours; the values mean the same
RENAMED: dict[str, str] = {
    "max_iter_data_loader": "max_batches",
    "hessian_damp": "damping",
    "col_block_size": "block_size",
    "verbose": "progress",
}
# options of ModelOpt and other libraries that have no counterpart of that name -> what to do instead
NO_EFFECT = "leave it out, it has no effect on sparsity"
ELSEWHERE: dict[str, str] = {
    "calib_size": "give max_batches, or num_samples with text; ModelOpt never reads it",
    "row_block_size": "leave it out, rows are independent and need no blocks",
    "checkpoint": "leave it out, ModelOpt stores nothing there",
    **dict.fromkeys(("score_func", "loss_func", "deployment"), NO_EFFECT),
    "dataset": "give data= (text, with tokenizer=) or data_loader= (batches)",
    "ignore": "give exclude=, globs of layers that stay dense",
    "targets": "give include=, globs of layers to prune",
    "sparsity": "give pattern=, such as 0.5, '50%' or '2:4'",
    "mask_structure": "give pattern=, such as '2:4'",
    "constraints": "give budget=, such as '60% flops'",
    "effective_bits": "give budget=, such as '60% bytes' with runtime='cusparselt'; nothing is quantized here",
    "target_size": "give budget=, such as '4.2e9 bytes' with runtime='cusparselt'",
    "pruning_ratio": "give pattern=0.5 for zeros, or mts.shrink(model, mlp=0.5) for a smaller model",
    "export_config": "give it to mts.shrink, as to=: a smaller model",
}


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with ModelOpt's keys renamed to ours. Raises ValueError for options given under both names."""
    for old, new in RENAMED.items():
        if old in options and new in options:
            raise ValueError(f"options {old!r} and {new!r} mean the same; give one")
    return {RENAMED.get(key, key): value for key, value in options.items()}


def class_rules(mode_config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules from ModelOpt's ``{"nn.Linear": {"*": {}, "*lm_head*": None}}``.

    In ModelOpt the last match counts, here the first one: so the order of the globs is reversed.
    """
    rules: list[Rule] = []
    for class_name, globs in mode_config.items():
        type_name = str(class_name).removeprefix("nn.")
        if type_name == class_name or not isinstance(getattr(torch.nn, type_name, None), type):
            raise ValueError(f"a class is such as 'nn.Linear', and {class_name!r} is none: give rules of globs alone")
        if globs is None or globs == {}:
            globs = {"*": globs}
        if not isinstance(globs, Mapping):
            raise TypeError(f"class rule {class_name!r}: {shown(globs)} must be a mapping of globs, or None")
        rules += [_as_rule(rule, type_name) for rule in reversed(list(globs.items()))]
        rules.append(Rule("*", None, type_name))  # layers of the class that no glob matches stay dense, as in ModelOpt
    return tuple(rules)


def parse_mode(entry: Any) -> tuple[str, tuple[Rule, ...]]:
    """An entry of a ModelOpt mode list, a name or ``(name, class rules)`` -> name and rules."""
    match entry:
        case str():
            return entry, ()
        case (str() as name, None | Mapping() as rules):
            return name, class_rules(rules or {})
    raise TypeError(f"mode list entry {shown(entry)}: give a name, or a name with class rules, ('sparsegpt', {{...}})")


# quality --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """Defaults for what the user does not set.

    method: name of the method.
    options: options of `SparsifyConfig`, for any pattern.
    shares: whether N:M patterns get ``permute``, and levels a budget of as many zeros.
    """

    method: str
    options: Mapping[str, Any]
    shares: bool = True

    def options_for(self, patterns: Iterable[Pattern | None]) -> dict[str, Any]:
        """The options for layers with one of these patterns; without any only those for all patterns."""
        permutes = self.shares and any(isinstance(pattern, NM) for pattern in patterns)
        return {**self.options, **({"permute": True} if permutes else {}), **({"budget": AUTO} if self.shares else {})}


BALANCED = {"self_data": "masked", "reconstruct": {"epochs": (4, 2), "masks": "auto", "metric": "auto"}}
BEST = {"self_data": "auto", "reconstruct": {"epochs": (8, 4), "masks": "auto", "metric": "auto"}, "distill": AUTO}
QUALITIES: dict[str, Quality] = {
    "fast": Quality("sparsegpt", {"polish": 3}, shares=False),
    "balanced": Quality("alps", BALANCED),
    "best": Quality("alps", BEST),
    "max": Quality("alps", {**BEST, "distill": {"epochs": 4, "optional": True}}),
}


def quality_of(name: object, method: Method | None = None) -> Quality:
    """The quality of this name. Raises ValueError if there is none, or if ``method`` does not learn from data."""
    if not isinstance(name, str) or name not in QUALITIES:
        allowed = ", ".join(map(repr, QUALITIES))
        raise ValueError(f"quality={shown(name)}{nearest(name, QUALITIES)}: allowed are {allowed}")
    if method is not None and method.needs == "nothing" and not isinstance(method, GivenMask):
        raise ValueError(f"quality={name!r} is for methods that learn from calibration data, unlike {method.name!r}")
    return QUALITIES[name]


# tuning ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """How blocks are reconstructed: each towards what it puts out in the dense model, so that it makes up for the
    sparse blocks before it.

    epochs: passes over the calibration batches; or two numbers: where these are the user's alone, and where they hold
      text that the model has written as well.
    learning_rate: of each tensor it is ``learning_rate * rms(kept weights) / sqrt(kept weights per output)``, and falls
      to 0 as a cosine. Where the block's relative squared error e is below 0.01 it is ``sqrt(e / 0.01)`` of that.
    norms_and_biases: tune the vectors too, not only the pruned weights. Matrices that stay dense are never touched.
    masks: "frozen", or "move": which weights are kept may change in the first part of the steps (SR-STE, arXiv
      2102.04010). "auto": those of layers move that have seen 512 tokens for each input channel of each matrix, for
      moving pays with much data. Masks of your own stay, and so do those of float16 weights, which are too coarse for
      it.
    metric: what the error of a block's output is measured with: "plain", the squared error; "fisher", by what the
      predictions of the dense model depend on, which takes one backward pass through the whole model; "auto": that,
      and the plain one where the model is streamed, its output is not known, or its calls are not, as the report says.
    """

    epochs: int | tuple[int, int] = 4
    learning_rate: float = 0.2
    norms_and_biases: bool = True
    masks: Literal["frozen", "move", "auto"] = "frozen"
    metric: Literal["plain", "fisher", "auto"] = "plain"

    def __post_init__(self) -> None:
        check_options(self, "reconstruct: ")
        for epochs in self.epochs if isinstance(self.epochs, tuple | list) and len(self.epochs) == 2 else [self.epochs]:
            check_whole("reconstruct: epochs", epochs)
        check_number("reconstruct: learning_rate", self.learning_rate, "(0, 10]")

    def settled(self, *, own_text: bool) -> "Reconstruct":
        """The options for data with text of the model's own, or without it. Masks and metric stay open if "auto"."""
        return self if isinstance(self.epochs, int) else replace(self, epochs=self.epochs[own_text])


@dataclass(frozen=True, kw_only=True)
class Distill:
    """How the whole sparse model is tuned to put out what the dense one did, as the last step.

    epochs: passes over the calibration batches.
    learning_rate: as in `Reconstruct`, but ``sqrt(d)`` of it where the KL divergence d before it is below 1 nat, and
      ``sqrt(e / 0.1)`` where a squared error e is below 0.1; it is smaller by an order of magnitude, for all blocks
      move together.
    moments: the dtype that the optimizer holds its two moments in between steps, "bfloat16" or "float32", with which a
      weight that stays takes 12 bytes instead of 8. Steps are computed in float32.
    optional: where the model cannot be distilled, or there is no memory for it, leave it out, and say so in the report.
      ``distill="auto"`` is this one, with the other options as they are here.
    """

    epochs: int = 2
    learning_rate: float = 0.12
    moments: Literal["bfloat16", "float32"] = "bfloat16"
    optional: bool = False

    def __post_init__(self) -> None:
        check_options(self, "distill: ")
        check_number("distill: learning_rate", self.learning_rate, "(0, 10]")


Tuning = TypeVar("Tuning", Reconstruct, Distill)


# from what the user writes to what an option holds --------------------------------------------------------------------


POLISH = 30  # iterations of polish=True
ALWAYS, OF_TEXT = "always", "text"  # when a report names an option


def option(default: Any, parse: Callable[[Any], Any] | None = None, **keywords: Any) -> Any:
    """A field of `SparsifyConfig`.

    parse: from what the user writes to what the option holds; None, where it is the default, stays.
    reported: ALWAYS, or OF_TEXT: where the data is text. Without it reports do not name the option.
    least: the smallest of whole numbers, if it is not 1; None: any.
    """
    return field(default=default, metadata={"parse": parse, **keywords})


def reported(default: Any, parse: Callable[[Any], Any] | None = None, **keywords: Any) -> Any:
    """An `option` that reports always name."""
    return option(default, parse, reported=ALWAYS, **keywords)


def _parse_tuning(make: type[Tuning], value: Any) -> Tuning | None:
    """An option of the name of ``make`` as users write it: True, False, a number of epochs, or a mapping."""
    name = make.__name__.lower()
    if value is False:
        return None
    if isinstance(value, make):
        return value
    if isinstance(value, int):
        return make() if value is True else make(epochs=value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={shown(value)}: give True, False, a number of epochs, or a mapping of its options")
    refuse_unknown(value, [option.name for option in fields(make)], f"{name}: ")
    return make(**value)


def _iterations(value: Any) -> Any:
    return (POLISH if value else 0) if isinstance(value, bool | None) else value


def _masks(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping) or not value:
        kind = "empty" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise TypeError(f"masks is {kind}: give a mapping of parameter names to masks")
    for name, mask in value.items():
        bools = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not mask.is_meta
        if not isinstance(name, str) or not bools:
            raise TypeError(f"masks[{name!r}] must be a torch.bool tensor, True = kept, under a parameter's name")
        if not mask.any():
            raise ValueError(f"masks[{name!r}] keeps nothing: a layer keeps at least one weight")
    return dict(value)


def _globs(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    globs = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{key}={shown(value)}: give a glob of layer names, or a list of them")
    return globs


def _bytes(value: Any) -> Any:
    try:
        return convert_file_size_to_int(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"memory_limit={shown(value)}: give bytes, or a number with a unit, such as '16GB'") from None


def _dtype_name(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {shown(value)} is not known: {error}") from None


# config ---------------------------------------------------------------------------------------------------------------

DEFAULT_PATTERN = NM(2, 4)
DATA_SET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[^:\s]*(:\S+)?)?")  # NAME[:CONFIG[:SPLIT]]
FILES = (".txt", ".jsonl")
STEP_TOKENS = 1024  # about as many are in a step of the optimizer
LEAST_STEPS = 32  # in an epoch, as far as there are rows
HELD_BACK = 16  # one of so many steps, at least one, only judges
HELD_BACK_FOR_OUTPUTS = 4  # the same where the model's output judges, whose divergence varies more from row to row
SELF = "self"  # as data: text that the model writes, all of it
TOKENS_TO_MOVE = 512  # for each input channel of a matrix: with so many masks="auto" move
OWN_BATCH = 32  # windows that the model writes at a time: what they are depends on it, if only in the last bits
OWN_WINDOWS = {"auto": 3, "masked": 1}  # what `self_data` may be: windows that the model writes for each of the user's
OF_OUTPUT = ("output", "divergence")  # in a report where they are set


@dataclass(frozen=True, kw_only=True)
class SparsifyConfig:
    """The options of `sparsify`, `make_plan` and the command line.

    Values are taken as `sparsify` takes them, and checked: raises ValueError or TypeError that names the option.

    What to prune:
      pattern: "2:4", any "N:M" (N kept), 0.5, "50%" (pruned) or a pattern object.
      include: globs of layer names to prune instead of every layer in the model's blocks. Output heads and
        routers stay dense unless a full name, without wildcards, asks for them, here or in a rule; embeddings and what
        is tied to them always do.
      exclude: globs of layer names to leave dense.
      rules: ordered ``{glob: options or None}``; the first match wins; options are ``pattern``, ``method`` and the
        method's own; None leaves the layer dense.
      masks: ``{parameter name: mask}`` of your own (bool, True = kept) in place of a method; other layers stay dense.
      replace: False keeps the zeros of a mask that a layer carries already, and counts them; a pattern with fewer zeros
        is an error. True drops the mask and solves the layer as a dense one.
      hardware_only: prune only layers whose shape ASP takes (rows a multiple of 8, columns of 16).
      options: the method's own options, such as ``damping``; `sparsify` takes them as keywords too.
    Calibration data, from ``data_loader``, ``forward_loop`` or ``data``:
      data_loader: an iterable of batches: tensors, tuples, dicts, BatchEncodings.
      collect_func: a function that turns a batch of ``data_loader`` into the model's input.
      max_batches: stop after so many batches of ``data_loader``.
      forward_loop: a function of the model that runs it on the data; it may be called several times.
      data: text, chats or images. A list holds documents, chats or images. A Path is a .txt or .jsonl file, or a folder
        with a data set. A string is the name of a data set, NAME[:CONFIG[:SPLIT]], never a file or a text. A data set
        of the library datasets, or a column of it, is taken as it is. "self" is text that a causal language model
        writes itself, from nothing but its beginning-of-text token.
      tokenizer: for ``data`` that is text or chats; "self" needs none.
      processor: for ``data`` that is images.
      num_samples: how many windows of text, or images, are drawn.
      seq_len: tokens in a window. None: 2048, or the model's maximum if that is less.
      batch_size: windows, or images, in a batch. None: about 2048 tokens on the CPU and 8 windows elsewhere; about 1024
        tokens where something is tuned; 8 images.
      seed: which windows are drawn.
      self_data: how many more windows of text a language model writes itself before anything is pruned. A causal one
        goes on from prompts cut out of the calibration data, or answers its chats; a masked one draws the tokens of the
        data's rows anew, in four passes. "auto": three for each of the user's; of another model that takes tokens these
        begin as one of the user's and end as another. "masked": one for each of them, by a masked model alone. They
        take part in statistics and in all tuning, and never judge.
      count_padding: let padding tokens into the statistics instead of asking for a mask that fits.
      min_tokens: experts of a mixture that are routed fewer tokens than this get what ``experts`` says.
      experts: "pool" fills such experts up to ``min_tokens`` from the tokens of all experts of the layer; "all_tokens"
        solves them as if every token were routed to them; "weight_only" solves them by their weights alone.
      memory_limit: bytes, or text such as "16GB", that statistics and solvers of a mixture's experts may take at a
        time: tokens are kept, and as many experts solved together as fit. None: all experts of a layer.
    How:
      sequential: "block", "stage" or "none": which part of the model before a layer is already sparse when its
        statistics are collected.
      quality: "fast", "balanced", "best" or "max" sets those of the options below that are not given, and the method
        if none is.
      permute: reorder the hidden channels of MLPs, and those inside of value heads, so that an N:M pattern keeps more;
        the dense model computes the same. Channels inside of fused experts stay in their order.
      update: False keeps the dense values of the weights that stay: masks only.
      polish: after the method, the best values for the kept weights of each layer by conjugate gradients: how many
        iterations at most; True is 30.
      reconstruct: after its layers, tune each block's kept weights, norms and biases against the dense block; True,
        the number of epochs, or a mapping of `Reconstruct`'s options.
      distill: after the last block, tune the kept weights, norms and biases of the whole model to put out what the
        dense model did; True, the number of epochs, or a mapping of `Distill`'s options. "auto", which
        ``quality`` sets: True, or None where the model cannot be distilled or memory is short; the report says why.
      budget: what the layers that may be pruned may have in all, and which of ``choices`` each becomes is chosen to
        lose least: "35% zeros" at least, or at most so many of "bytes" or "flops", as a share with % or an amount,
        "4.2e9 bytes". "auto", which ``quality`` sets: the zeros of an unstructured ``pattern``, or that pattern in
        every layer where losses cannot be measured; the report says why.
      choices: what a layer may become under a budget: "dense", and what ``pattern`` takes. None: ("dense", pattern) if
        an N:M ``pattern`` is given, or the budget is of bytes, else "dense", 20 %, 25 %, and so on to 80 %. A rule may
        have ``choices`` of its own; one with nothing but a ``pattern`` fixes that.
      runtime: the library whose packed 2:4 weights a budget of bytes counts, "cusparselt" or "cutlass".
      losses: path of a JSON file with the losses of all choices: written, or if it is there used for another budget.
      output: what counts of the model's output, for a budget, the Fisher metric and distill: a name, an index, or a
        function from the output to a tensor. None: its ``logits``, else the tensor that it is, or the only tensor of
        numbers in it.
      divergence: how far the sparse model's output is from the dense one's: "kl", of logits over the last axis;
        "squared", the squared error in parts of the dense output's variance; "bernoulli", the KL divergence of each
        number, a probability; or a function of (dense, sparse), without padding, to a tensor whose mean counts. None:
        "kl" of ``logits``, "squared" of others; of logits whose ``problem_type`` in the config is
        "multi_label_classification" "bernoulli", and "squared" of "regression".
      device: where blocks are calibrated and solved. None: where they are.
      autocast: "bfloat16" or "float16" runs the blocks under torch.autocast: faster for float32 models, and statistics
        are of activations in that precision; sums and solvers keep theirs. None: the model's own precision.
      float32_products: whether layers of bfloat16 that run on the CPU are multiplied in float32. None: where the CPU
        has no products of bfloat16, which torch then makes slowly. What is tuned keeps its precision.
      enforce: True makes sparse modules that hold their masks; False leaves plain modules with zeros.
      progress: True or False. None: a bar on a terminal and in a notebook, elsewhere a line every minute.
    Several processes (torchrun), which end with the same bits:
      distributed: None works together with all processes of torch.distributed's default group, if it has been
        initialised; False makes this process work by itself; True is an error without a group.
      split_data: True: all processes give the same data, and each takes its share, rank r of N the batches r, r + N,
        and so on; False: what each gives is its share. A forward_loop always is.
    """

    # in the order of reports
    pattern: Pattern = option(DEFAULT_PATTERN, parse_pattern)
    include: tuple[str, ...] | None = option(None, partial(_globs, "include"))
    exclude: tuple[str, ...] = option((), partial(_globs, "exclude"))
    rules: tuple[Rule, ...] = option((), lambda x: parse_rules(x or ()))
    masks: Mapping[str, torch.Tensor] | None = option(None, _masks)
    hardware_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    data_loader: Iterable[Any] | None = None
    collect_func: Callable[[Any], Any] | None = None
    forward_loop: Callable[[torch.nn.Module], Any] | None = None
    max_batches: int | None = None
    data: Any = option(None, lambda x: Stream(x) if isinstance(x, Iterator) else x)  # it may be read twice
    tokenizer: Any = None
    processor: Any = None
    replace: bool = reported(False)
    sequential: Literal["block", "stage", "none"] = reported("block")
    enforce: bool = reported(True)
    seed: int = reported(0, least=None)
    count_padding: bool = reported(False)
    min_tokens: int = reported(128)
    experts: Literal["pool", "all_tokens", "weight_only"] = reported("pool")
    memory_limit: int | None = reported(None, _bytes)
    self_data: int | str = reported(0)
    quality: str | None = reported(None)
    permute: bool = reported(False)
    update: bool = reported(True)
    polish: int = reported(0, _iterations, least=0)
    reconstruct: Reconstruct | None = reported(None, partial(_parse_tuning, Reconstruct))
    distill: Distill | None = reported(
        None, lambda x: Distill(optional=True) if x == AUTO else _parse_tuning(Distill, x)
    )
    budget: Budget | None = reported(None, lambda x: x if x == AUTO else parse_budget(x))
    choices: tuple[Pattern | None, ...] | None = reported(None, parse_choices)
    runtime: Literal["cusparselt", "cutlass", None] = reported(None)
    autocast: Literal["bfloat16", "float16", None] = reported(None, _dtype_name)
    float32_products: bool | None = reported(None)
    num_samples: int = option(128, reported=OF_TEXT)
    seq_len: int | None = option(None, reported=OF_TEXT)
    batch_size: int | None = option(None, reported=OF_TEXT)
    losses: Path | None = option(None, Path)
    output: Which | None = option(None, lambda x: int(x) if isinstance(x, str) and x.isdecimal() else x)  # --output 0
    divergence: Divergence | None = None
    device: torch.device | None = option(None, _device)
    progress: bool | None = None
    distributed: bool | None = None
    split_data: bool = True

    _passed: ClassVar[frozenset[str]]  # names of the options that the caller gave

    def __new__(cls, **options: Any) -> "SparsifyConfig":
        config = super().__new__(cls)
        declared = fields(cls)
        if len(options) == len(declared):  # from dataclasses.replace, which passes defaults too
            options = {x.name: options[x.name] for x in declared if options[x.name] is not x.default}
        vars(config)["_passed"] = frozenset(options)
        return config

    def __post_init__(self) -> None:
        for declared in fields(self):
            value, parse = plain_number(getattr(self, declared.name)), declared.metadata.get("parse")
            if parse is not None and not (value is None and declared.default is None):
                value = parse(value)
            vars(self)[declared.name] = value
        if self.budget is not None and (self.budget == AUTO or self.budget.optional):
            self._share_zeros()
        if self.budget is not None and self.choices is None:
            named = isinstance(self.pattern, NM) and ("pattern" in self._passed or self.budget.unit == "bytes")
            vars(self)["choices"] = (None, self.pattern) if named else parse_choices(LEVELS)
        _check_types(self)
        if (problem := next(_problems(self), None)) is not None:
            raise ValueError(problem)

    def _share_zeros(self) -> None:
        """Put in place what the budget "auto" stands for: as many zeros as the pattern has, or None where that is no
        sparsity between those that layers may have, or where other options say where zeros go."""
        budget, pattern, rule_options = None, self.pattern, {name for rule in self.rules for name in rule.options or ()}
        elsewhere = self.masks is not None or rule_options & {"pattern", "choices"}
        if isinstance(pattern, Unstructured) and 0 < pattern.sparsity < MAX_BUDGET_SPARSITY and not elsewhere:
            budget, choices = zeros_of(pattern)
            vars(self)["choices"] = tuple(dict.fromkeys((pattern, *(self.choices or choices))))
        vars(self)["budget"] = budget

    @classmethod
    def make(
        cls, method: Method, config: "SparsifyConfig | Mapping[str, Any] | None" = None, **keywords: Any
    ) -> "SparsifyConfig":
        """A config from a config, a mapping or None, and keywords, which win; ModelOpt's key names are translated."""
        if isinstance(config, SparsifyConfig):
            options = config.explicit()
        elif config is None or isinstance(config, Mapping):
            options = dict(config or {})
        else:
            raise TypeError(f"config is a {type(config).__name__}: give a mapping, a SparsifyConfig or None")
        options = {**translated(options), **translated(keywords)}
        by_user = frozenset(options)
        if options.get("quality") is not None:
            quality = quality_of(options["quality"], method)
            patterns, choices = (parse_pattern(options.get("pattern", DEFAULT_PATTERN)),), options.get("choices")
            budget = str(options.get("budget") or "")
            if options.get("masks") is not None:  # they leave nothing to choose by pattern
                patterns = ()
            elif budget and (choices is not None or ("pattern" not in options and "bytes" not in budget)):
                patterns = parse_choices(LEVELS if choices is None else choices)
            options = {**quality.options_for(patterns), **options}
        known = cls.names()
        method_options = {key: options.pop(key) for key in list(options) if key not in known and key in method.options}
        for name in options.keys() & ELSEWHERE.keys() - method.options.keys():
            raise ValueError(f"option {name!r} is not known: {ELSEWHERE[name]}")
        refuse_unknown(options, [*known, *method.options])
        made = cls(**options, options=method_options)
        vars(made)["_passed"] &= by_user  # without what the quality has set
        used = made.budget or made.distill or (made.reconstruct and made.reconstruct.metric != "plain")
        if not used and (extra := [name for name in OF_OUTPUT if getattr(made, name) is not None]):
            raise ValueError(f"{' and '.join(extra)} go with budget=, distill= or reconstruct's metric: give one")
        return made

    @classmethod
    def names(cls) -> list[str]:
        """The options, without those of methods."""
        return [option.name for option in fields(cls) if option.name != "options"]

    def explicit(self) -> dict[str, Any]:
        """The options that the user gave, with the method's own; ``quality`` may choose the others."""
        return {name: getattr(self, name) for name in self.names() if name in self._passed} | dict(self.options)

    def windows_per_batch(self, windows: int, seq_len: int, device: torch.device) -> int:
        """Windows of text in a batch: ``batch_size``, or without one about 2,048 tokens on the CPU, and 8 windows on
        other devices. A run in steps takes about 1,024 tokens and at least 32 batches: the last ones judge."""
        if self.batch_size is not None:
            return self.batch_size
        if self.in_steps:
            return max(1, min(STEP_TOKENS // seq_len, windows // LEAST_STEPS))
        return default_batch_size(seq_len, device)

    def counts(self) -> dict[str, Any]:
        """The options output and divergence that the user has set, by name."""
        return {name: name_of(value) for name in OF_OUTPUT if (value := getattr(self, name)) is not None}

    def settings(self) -> dict[str, Any]:
        """The options in a report, as values of JSON: all that the result depends on, without the data and without what
        each layer's row says."""
        when = (ALWAYS, OF_TEXT) if self.holds_text else (ALWAYS,)
        names = [option.name for option in fields(self) if option.metadata.get("reported") in when]
        values = {name: getattr(self, name) for name in names}
        values |= {"budget": None if self.budget is None else str(self.budget)}
        values |= {"choices": None if self.choices is None else [str(choice or DENSE) for choice in self.choices]}
        values |= self.counts()
        return {name: asdict(x) if isinstance(x, (Reconstruct, Distill)) else x for name, x in values.items()}

    def widens(self, model: torch.nn.Module) -> bool:
        """Whether the model's layers of bfloat16 are multiplied in float32."""
        return self.autocast is None and widens(model, self.device, self.float32_products)

    @property
    def holds_text(self) -> bool:
        """Whether ``data`` is text, whose windows are known before it is read."""
        return self.data is not None and self.processor is None

    @property
    def writes_its_data(self) -> bool:
        """Whether the model writes all of the calibration data."""
        return isinstance(self.data, str) and self.data == SELF

    @property
    def must_distill(self) -> bool:
        """Whether the model is distilled, or the run ends with an error."""
        return self.distill is not None and not self.distill.optional

    @property
    def tunes(self) -> bool:
        """Whether something is tuned on the calibration batches."""
        return self.reconstruct is not None or self.distill is not None

    @property
    def in_steps(self) -> bool:
        """Whether batches are put into steps: something is tuned on some of them, or chosen by some of them."""
        return self.tunes or self.permute or self.budget is not None


def is_data_set(text: str) -> bool:
    """Whether a string is the name of a data set, NAME[:CONFIG[:SPLIT]], and not a file's or a text."""
    return DATA_SET.fullmatch(text) is not None and not text.endswith(FILES) and not Path(text).exists()


# what does not go together --------------------------------------------------------------------------------------------


def _check_types(config: SparsifyConfig) -> None:
    check_options(config)
    output, divergence = config.output, config.divergence
    if not (output is None or isinstance(output, str) or is_whole(output, 0) or callable(output)):
        raise ValueError(f"output={shown(output)}: give a name, an index, or a function from the output to a tensor")
    if not (divergence is None or divergence in DIVERGENCES or callable(divergence)):
        allowed = f"{', '.join(DIVERGENCES)}, or a function of (dense, sparse)"
        raise ValueError(f"divergence={shown(divergence)}: give {allowed}")
    if config.self_data not in [*OWN_WINDOWS] and not is_whole(config.self_data, 0):
        allowed = " or ".join(map(repr, OWN_WINDOWS))
        raise ValueError(f"self_data={shown(config.self_data)}: must be a number of windows of text, 0, {allowed}")
    if config.losses is not None:
        refuse_no_folder(config.losses)
    data = config.data_loader
    if data is not None and (isinstance(data, Mapping) or not isinstance(data, (Iterable, Dataset))):
        raise TypeError(f"data_loader is a {type(data).__name__}: give an iterable of batches")
    for name in ("collect_func", "forward_loop", "tokenizer", "processor"):
        if (value := getattr(config, name)) is not None and not callable(value):
            raise TypeError(f"{name} is a {type(value).__name__}: it must be callable")
    if isinstance(config.data, str) and not config.writes_its_data and not is_data_set(config.data):
        raise TypeError(f"data={config.data[:60]!r} is no data set's name: give a Path for a file, and a list for text")


def _problems(config: SparsifyConfig) -> Iterator[str]:
    """Yield what is wrong with options that do not go together."""
    sources = [name for name in ("data_loader", "forward_loop", "data") if getattr(config, name) is not None]
    writes, loop, images = config.writes_its_data, config.forward_loop is not None, config.processor is not None
    reconstruct, distill, masks = config.reconstruct, config.must_distill, config.masks is not None

    def among(*names: str) -> str:
        """The names of those options that the user gave, in words."""
        return " and ".join(name for name in names if getattr(config, name))

    if len(sources) > 1:
        yield f"{' and '.join(sources)} are given: calibration takes one source of data, keep one"
    if writes and (images or not config.split_data):
        option = "processor=" if images else "split_data=False"
        yield f"data='self' is text that the model writes, the same in all processes: leave {option} out"
    if config.data is not None and not writes and config.tokenizer is None and not images:
        yield "data is text and needs tokenizer=, for example AutoTokenizer.from_pretrained(...)"
    if images and (config.data is None or config.tokenizer is not None):
        yield "processor= makes the model's inputs of images, or of chats with images: give data=, and no tokenizer="
    if config.autocast is not None and config.float32_products:
        yield f"float32_products=True and autocast={config.autocast!r} are two precisions for one product: keep one"
    if config.collect_func is not None and config.data_loader is None:
        yield "collect_func turns batches of data_loader into inputs; give data_loader as well"
    if reconstruct is not None and reconstruct.metric == "fisher" and loop:
        yield "metric='fisher' calls the model itself, and a forward_loop does so in its own way: give data= instead"
    if distill and loop:
        yield "distill calls the model itself: give data= or data_loader= instead of forward_loop, or leave distill out"
    if config.max_batches is not None and loop:
        yield "max_batches counts batches of data_loader or text; a forward_loop ends where it ends"
    if config.self_data not in (0, *OWN_WINDOWS) and (loop or not config.split_data):
        option = "forward_loop" if loop else "split_data=False"
        yield f"self_data adds text to data that all processes have, and with {option} they have none: leave one out"
    if not config.update and (changing := among("polish", "reconstruct", "distill")):
        setter = "" if config.quality is None else f" (set by quality={config.quality!r})"
        yield f"update=False keeps the dense values, which {changing}{setter} would change: leave one of them out"
    if reconstruct is not None and config.sequential == "none":
        yield "reconstruct tunes a block on what the sparse blocks before it put out: use sequential='block' or 'stage'"
    if distill and not config.enforce:
        yield "distill tunes sparse modules, and enforce=False leaves none: leave one out; export(model) comes after"
    if masks and reconstruct is not None and reconstruct.masks == "move":
        yield "masks= says which weights stay, and reconstruct's masks='move' would choose others"
    if config.budget is None and (extra := among("choices", "runtime", "losses")):
        yield f"{extra} go with budget=: give one, such as budget='35% zeros'"
    if config.budget is not None and loop and not config.budget.optional:
        yield "budget calls the model itself: give data= or data_loader= instead of forward_loop"
    if config.budget is not None and config.budget.unit == "bytes" and config.runtime is None:
        yield "a budget of bytes counts a runtime's files, for a plain folder stores zeros: give runtime='cusparselt'"
    if masks and (choosing := among("budget", "permute")):
        yield f"masks= says which weights stay, and {choosing} would choose others; leave one of them out"
