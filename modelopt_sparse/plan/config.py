"""Every option of `sparsify`, validated once, before any work."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int
from torch.utils.data import Dataset

from modelopt_sparse.methods import ALIASES, METHODS
from modelopt_sparse.methods.base import NEEDS, Method, is_number
from modelopt_sparse.methods.patterns import Pattern, parse_pattern
from modelopt_sparse.methods.user_masks import GivenMask
from modelopt_sparse.plan.modelopt import MODE_RULES, parse_mode, translated
from modelopt_sparse.plan.quality import quality_of
from modelopt_sparse.plan.rules import Rule, class_rules, parse_rules
from modelopt_sparse.reports.text import nearest, unknown_option

SEQUENTIAL = ("block", "stage", "none")
ALLOCATIONS = ("uniform", "block", "owl", "search")
EXPERTS = ("pool", "all_tokens", "weight_only")
AUTOCAST = ("bfloat16", "float16")
POLISH_ITERATIONS, REFINE_SWEEPS = 30, 3  # what polish=True and refine=True stand for
DEFAULT_METHOD, DEFAULT_PATTERN = "sparsegpt", "2:4"


TARGETS = ("dense", "sparse")


PARTS = ("block", "children")


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """How blocks are reconstructed.

    epochs: passes over the calibration batches.
    learning_rate: relative to the root mean square of each tensor's kept values, divided by the root of how many of
      them meet in one output; falls to 0 as a cosine.
    target: "dense": what the block puts out in the dense model, so that it makes up for the blocks before it;
      "sparse": what the dense block makes of the input that it gets from the sparse blocks before it.
    parts: "block": all of it at once; "children": first each child of the block that holds pruned layers (the
      attention) against its own output, then the rest (the MLP and the norms) against the block's.
    norms_and_biases: tune the vectors too, not only the pruned weights. Matrices that stay dense are never touched.
    """

    epochs: int = 4
    learning_rate: float = 0.4
    target: str = "dense"
    parts: str = "block"
    norms_and_biases: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"reconstruct: epochs={self.epochs!r}: must be a positive whole number")
        if not is_number(self.learning_rate) or not 0 < self.learning_rate <= 10:
            raise ValueError(f"reconstruct: learning_rate={self.learning_rate!r}: must be a number in (0, 10]")
        for name, allowed in (("target", TARGETS), ("parts", PARTS)):
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise ValueError(f"reconstruct: {name}={given!r}: allowed are {', '.join(map(repr, allowed))}")
        if not isinstance(self.norms_and_biases, bool):
            raise ValueError(f"reconstruct: norms_and_biases={self.norms_and_biases!r}: must be True or False")


@dataclass(frozen=True, kw_only=True)
class SparsifyConfig:
    """The options of `sparsify`, `make_plan` and the command line. Build it with `SparsifyConfig.make`.

    What to prune:
      pattern: "2:4", any "N:M" (N kept), 0.5, "50%" (pruned) or a pattern object.
      include: globs of layer names to prune instead of every layer in the model's blocks. Output heads and
        routers stay dense unless a full name, without wildcards, asks for them, here or in a rule; embeddings and what
        is tied to them always do.
      exclude: globs of layer names to leave dense.
      rules: ordered ``{glob: options or None}``; the first match wins; options are ``pattern``, ``method`` and the
        method's own; None leaves the layer dense.
      masks: ``{parameter name: mask}`` of your own (bool, True = kept) in place of a method; other layers stay dense.
      hardware_only: prune only layers whose shape ASP takes (rows a multiple of 8, columns of 16).
      options: the method's own options, such as ``damping``.
    Calibration data, one of three:
      data_loader: an iterable of batches (tensors, tuples, dicts, BatchEncodings); ``collect_func`` turns a batch into
        the model's input; ``max_batches`` stops early.
      forward_loop: a function of the model that runs it on the data; called several times.
      data: text (a string, a list of documents, or a Path of a .txt or .jsonl file) with ``tokenizer``; cut into
        ``num_samples`` windows of ``seq_len`` tokens (default: 2048 or the model's maximum), drawn by ``seed``, in
        batches of ``batch_size``.
      count_padding: let padding tokens into the statistics instead of asking for a mask that fits.
      min_tokens: experts of a mixture that are routed fewer tokens than this get what ``experts`` says.
      experts: "pool" (default) fills them up to ``min_tokens`` from the tokens of all experts of the layer;
        "all_tokens" solves them as if every token were routed to them; "weight_only" by their weights alone.
      memory_limit: bytes, or text such as "16GB", that statistics and solvers of a mixture's experts may take at a
        time: tokens are kept, and as many experts solved together as fit. Default: all experts of a layer.
    How:
      sequential: "block" (default), "stage" or "none": which part of the model before a layer is already sparse when
        its statistics are collected.
      permute: reorder the hidden channels of MLPs so that an N:M pattern keeps more; the dense model computes the same.
        Those inside of fused experts stay in their order.
      update: False keeps the dense values of the weights that stay: masks only.
      refine: swap kept and pruned weights while that lowers the layer's error with dense values; True, or how many
        sweeps.
      polish: after the method, the best values for the kept weights of each layer by conjugate gradients; True, or how
        many iterations at most.
      reconstruct: after its layers, tune each block's kept weights, norms and biases against the dense block; True,
        the number of epochs, or a mapping of `Reconstruct`'s options.
      allocation: "uniform" (default), "block", "owl" or "search": how the zeros of an unstructured pattern are shared
        out over the layers.
      quality: "fast", "balanced" or "best" sets those of these options that are not given, and the method if none is.
      device: where blocks are calibrated and solved; default: where they are.
      autocast: "bfloat16" or "float16" runs the blocks under torch.autocast: faster for float32 models, and statistics
        are of activations in that precision; sums and solvers keep theirs. Default: the model's own precision.
      enforce: True makes sparse modules that hold their masks; False leaves plain modules with zeros.
      progress: True or False; default: a bar if standard error is a terminal.
    Several processes (torchrun), which end with the same bits:
      distributed: None (default) works together with all processes of torch.distributed's default group, if it has been
        initialised; False makes this process work by itself; True is an error without a group.
      split_data: True (default): all processes give the same data, and each takes its share, rank r of N the batches r,
        r + N, and so on; False: what each gives is its share. A forward_loop always is.
      deterministic: statistics are summed in float64 in the order of the batches, so that any number of processes gives
        the bits of one.
    """

    pattern: Pattern = field(default_factory=lambda: parse_pattern(DEFAULT_PATTERN))
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    masks: Mapping[str, torch.Tensor] | None = None
    hardware_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    data_loader: Iterable[Any] | None = None
    collect_func: Callable[[Any], Any] | None = None
    forward_loop: Callable[[torch.nn.Module], Any] | None = None
    max_batches: int | None = None
    data: str | Path | Sequence[str] | None = None
    tokenizer: Any = None
    num_samples: int = 128
    seq_len: int | None = None
    batch_size: int = 8
    count_padding: bool = False
    min_tokens: int = 128
    experts: str = "pool"
    memory_limit: int | None = None
    sequential: str = "block"
    permute: bool = False
    update: bool = True
    refine: int = 0
    polish: int = 0
    reconstruct: Reconstruct | None = None
    allocation: str = "uniform"
    quality: str | None = None
    device: torch.device | None = None
    autocast: str | None = None
    enforce: bool = True
    seed: int = 0
    progress: bool | None = None
    distributed: bool | None = None
    split_data: bool = True
    deterministic: bool = False

    @classmethod
    def make(cls, method: Method, config: "SparsifyConfig | Mapping[str, Any] | None" = None, **more: Any):
        """A config from a config, a mapping or None, and keywords, which win; ModelOpt's key names are translated."""
        if isinstance(config, SparsifyConfig):
            given = config._given()
        elif config is None or isinstance(config, Mapping):
            given = dict(config or {})
        else:
            raise TypeError(f"config is a {type(config).__name__}: give a mapping, a SparsifyConfig or None")
        given = {**translated(given), **translated(more)}
        if MODE_RULES in given:
            if given.get("rules"):
                raise ValueError("rules are given both in the mode list and as an option; keep one")
            given["rules"] = given.pop(MODE_RULES)
        if given.get("quality") is not None:
            quality = quality_of(given["quality"], method)
            # masks of the user's own settle which weights stay, and with them all that goes by pattern
            pattern = parse_pattern(given.get("pattern", DEFAULT_PATTERN)) if given.get("masks") is None else None
            given = {**quality.options_for(pattern), **given}
        known = [item.name for item in fields(cls) if item.name != "options"]
        options = {key: given.pop(key) for key in list(given) if key not in known and key in method.options}
        for key in given:
            if key not in known:
                raise ValueError(unknown_option(key, [*known, *method.options]))
        return cls(**_parsed(given), options=options)

    def _given(self) -> dict[str, Any]:
        """The options that differ from their defaults, the method's own among them."""
        default = SparsifyConfig()
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "options"}
        return {key: value for key, value in given.items() if value is not getattr(default, key)} | dict(self.options)

    def __post_init__(self) -> None:
        sources = [name for name in ("data_loader", "forward_loop", "data") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given: calibration takes one source of data, keep one")
        if self.data is not None and self.tokenizer is None:
            raise ValueError("data is text and needs tokenizer=, for example AutoTokenizer.from_pretrained(...)")
        if self.collect_func is not None and self.data_loader is None:
            raise ValueError("collect_func turns batches of data_loader into inputs; give data_loader as well")
        if self.max_batches is not None and self.forward_loop is not None:
            raise ValueError("max_batches counts batches of data_loader or text; a forward_loop ends where it ends")
        if self.sequential not in SEQUENTIAL:
            raise ValueError(f"sequential={self.sequential!r}: allowed are {', '.join(map(repr, SEQUENTIAL))}")
        if self.experts not in EXPERTS:
            raise ValueError(f"experts={self.experts!r}: allowed are {', '.join(map(repr, EXPERTS))}")
        for name in ("max_batches", "num_samples", "seq_len", "batch_size", "min_tokens", "memory_limit"):
            value = getattr(self, name)
            open_ = value is None and name != "min_tokens"
            if not open_ and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: must be a positive whole number")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: must be a whole number")
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"allocation={self.allocation!r}: allowed are {', '.join(map(repr, ALLOCATIONS))}")
        for name in ("refine", "polish"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r}: must be True, False or a positive whole number")
        changing = [name for name in ("polish", "reconstruct") if getattr(self, name)]
        if not self.update and changing:
            raise ValueError(
                f"update=False keeps the dense values, which {' and '.join(changing)} would change"
                + (f" (set by quality={self.quality!r})" if self.quality is not None else "")
                + "; leave one of them out, or use refine=True for a better mask"
            )
        if self.reconstruct is not None and self.sequential == "none":
            raise ValueError(
                "reconstruct tunes a block on what the sparse blocks before it put out: use sequential='block' or "
                "'stage', or leave reconstruct out"
            )
        if self.autocast not in (None, *AUTOCAST):
            allowed = ", ".join(map(repr, (*AUTOCAST, None)))
            raise ValueError(f"autocast={self.autocast!r}: allowed are {allowed} (the model's own precision)")
        choosing = {"refine": self.refine, "permute": self.permute, "allocation": self.allocation != "uniform"}
        if self.masks is not None and any(choosing.values()):
            given = " and ".join(name for name, wanted in choosing.items() if wanted)
            raise ValueError(f"masks= says which weights stay, and {given} would choose others; leave one of them out")
        flags = ("hardware_only", "count_padding", "enforce", "progress", "permute", "update")
        for name in (*flags, "distributed", "split_data", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name in ("progress", "distributed") and value is None):
                raise ValueError(f"{name}={value!r}: must be True or False")
        if self.data_loader is not None and not isinstance(self.data_loader, (Iterable, Dataset)):
            kind = type(self.data_loader).__name__
            raise TypeError(f"data_loader is a {kind}: give a list of batches, a DataLoader or another iterable")
        for name in ("collect_func", "forward_loop"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} is a {type(getattr(self, name)).__name__}: it must be callable")


def resolve(
    method: object, config: "SparsifyConfig | Mapping[str, Any] | None", options: Mapping[str, Any]
) -> "tuple[Method, SparsifyConfig]":
    """What the user said -> the method and the validated config. Without a method, ``masks`` or ``quality`` choose."""
    whole = config._given() if isinstance(config, SparsifyConfig) else config if isinstance(config, Mapping) else {}
    masks, quality = (options.get(key, whole.get(key)) for key in ("masks", "quality"))
    if masks is not None:
        if method is not None:
            raise ValueError(f"masks= takes the place of a method, and method={method!r} is given; keep one")
        method = GivenMask()
    elif method is None:
        method = DEFAULT_METHOD if quality is None else quality_of(quality).method
    found, config = resolve_method(method, config)
    return found, SparsifyConfig.make(found, config, **options)


def distributed_in(config: "SparsifyConfig | Mapping[str, Any] | None", options: Mapping[str, Any]) -> Any:
    """The option ``distributed``, before anything else is looked at: what is wrong with the rest in one process has to
    be heard by the others."""
    whole = {"distributed": config.distributed} if isinstance(config, SparsifyConfig) else config
    return options.get("distributed", whole.get("distributed") if isinstance(whole, Mapping) else None)


def resolve_method(method: object, config: Any) -> tuple[Method, Any]:
    """A name, alias, Method object or ModelOpt mode list -> the method and the config with the mode's rules added."""
    if isinstance(method, Method):
        if method.needs not in NEEDS:
            raise ValueError(f"method {method.name!r}: needs={method.needs!r}; allowed are {', '.join(NEEDS)}")
        return method, config
    if isinstance(method, list):
        if len(method) != 1:
            raise ValueError(f"a mode list names one method, this one has {len(method)}: {method!r}")
        name, mode_config = (method[0], None) if isinstance(method[0], str) else parse_mode(method[0])
        found, config = resolve_method(name, config)
        if not mode_config:
            return found, config
        if config is not None and not isinstance(config, Mapping):
            kind = type(config).__name__
            raise TypeError(f"a mode list with class rules goes with a mapping as config, not with a {kind}")
        return found, {**(config or {}), MODE_RULES: class_rules(mode_config)}
    if isinstance(method, str):
        name = ALIASES.get(method, method)
        if name in METHODS:
            return METHODS[name], config
        allowed = [*METHODS, *ALIASES]
        raise ValueError(f"method {method!r} is not known{nearest(method, allowed)}; allowed are {', '.join(allowed)}")
    raise TypeError(f"method is a {type(method).__name__}: give a name ({', '.join(METHODS)}) or a Method object")


def _parsed(given: dict[str, Any]) -> dict[str, Any]:
    if "pattern" in given:
        given["pattern"] = parse_pattern(given["pattern"])
    if "rules" in given:
        given["rules"] = parse_rules(given["rules"] or ())
    for key, meaning in (("polish", POLISH_ITERATIONS), ("refine", REFINE_SWEEPS)):
        if given.get(key, 0) is True or given.get(key, 0) is False or given.get(key, 0) is None:
            given[key] = meaning if given[key] else 0
    if "reconstruct" in given:
        given["reconstruct"] = _reconstruct(given["reconstruct"])
    if given.get("allocation", "") is None:
        given["allocation"] = "uniform"
    if isinstance(given.get("memory_limit"), str):
        try:
            given["memory_limit"] = convert_file_size_to_int(given["memory_limit"])
        except ValueError:
            raise ValueError(
                f"memory_limit={given['memory_limit']!r}: give bytes, or a number with a unit, such as '16GB'"
            ) from None
    if given.get("masks") is not None:
        given["masks"] = _masks(given["masks"])
    for key in ("include", "exclude"):
        if given.get(key) is not None:
            given[key] = _globs(key, given[key])
    if given.get("exclude", ()) is None:
        given["exclude"] = ()
    if isinstance(given.get("autocast"), torch.dtype):
        given["autocast"] = str(given["autocast"]).removeprefix("torch.")
    if given.get("device") is not None:
        try:
            given["device"] = torch.device(given["device"])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {given['device']!r} is not known: {error}") from None
    return given


def _reconstruct(value: Any) -> Reconstruct | None:
    if value is None or value is False:
        return None
    if isinstance(value, Reconstruct):
        return value
    if value is True:
        return Reconstruct()
    if isinstance(value, int):
        return Reconstruct(epochs=value)
    if not isinstance(value, Mapping):
        raise TypeError(f"reconstruct={value!r}: give True, False, a number of epochs, or a mapping of its options")
    known = [item.name for item in fields(Reconstruct)]
    for key in value:
        if key not in known:
            raise ValueError(f"reconstruct: {unknown_option(key, known)}")
    return Reconstruct(**value)


def _masks(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"masks is a {type(value).__name__}: give a mapping of parameter names to masks")
    for name, mask in value.items():
        if not isinstance(name, str) or not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise TypeError(f"masks[{name!r}] is a {kind}: it must be a torch.bool tensor, True = kept")
    return dict(value)


def _globs(key: str, value: Any) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{key}={value!r}: give a glob of layer names, or a list of them")
    return globs
