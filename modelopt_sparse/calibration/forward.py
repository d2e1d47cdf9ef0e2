"""Running a model over the calibration data: which tokens are padding, hooks that see the inputs of layers, the data
itself, and the context that forwards run in."""

import inspect
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.calibration.data import Call, batch_rows, digest_of, held_back, load_calls, source_of, split_steps
from modelopt_sparse.calibration.own_text import (
    calls_from_nothing,
    joined,
    monotonous,
    own_calls,
    token_rows,
    why_no_text,
)
from modelopt_sparse.calibration.rerun import Unknown, drawing_from
from modelopt_sparse.model.devices import (
    dense_rows,
    flat_tensors,
    in_float32,
    input_device,
    is_out_of_memory,
    map_batch,
    map_leaves,
    onloaded,
    parts_within,
    version,
)
from modelopt_sparse.model.hf import CACHES, is_encoder_decoder, takes
from modelopt_sparse.model.layers import CONV, Layer, TokenMasks
from modelopt_sparse.model.output import Output, OutputError, name_of
from modelopt_sparse.plan.options import OWN_WINDOWS
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.run import Run, Unreadable

# which tokens of a call are padding -----------------------------------------------------------------------------------


INSTEAD = "give batches without padding, or set count_padding=True to let padding into the statistics"
OWN, DECODER, IMAGE_MASKS = "attention_mask", "decoder_attention_mask", ("pixel_attention_mask", "pixel_mask")
OF_STATES = "encoder_attention_mask"  # of encoder_hidden_states
PADDING = ("padding_mask", "pad_mask")  # in masks whose names end like these True is padding


class PaddingError(ValueError):
    """Which rows are padding cannot be told."""


Side = Literal["encoder", "decoder", "image"]
SIDES: tuple[Side, ...] = ("encoder", "decoder", "image")
Around = Sequence[tuple[nn.Module, Side]]  # the modules around a place, the innermost first, and the side it is on


@dataclass(eq=False)
class PaddingOfCall:
    """The padding of one call of ``model``, or of a part that a loop calls by itself, of which its modules are told
    while the call runs.

    told: (module, side) -> which tokens are real, as the arguments say that the module was called with; None: all; an
    error if they do not say so. A module that is no encoder-decoder has its own tokens on its decoder's side, and those
    that it attends to on the encoder's. ``image`` is for the image encoder beside or inside of a text model, which text
    padding says nothing about.
    first: what the arguments of the call itself say.
    notes: get masks of tokens of which nothing says whether True is padding.
    """

    model: nn.Module | None = None
    notes: list[str] = field(default_factory=list)
    told: dict[tuple[Any, Side], Tensor | PaddingError | None] = field(default_factory=dict)
    first: dict[tuple[Any, Side], Tensor | PaddingError | None] = field(default_factory=dict)

    @torch.inference_mode(False)  # an inference tensor could not be saved for a backward pass
    def tell(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """A module is called. Where that is the model, or one of transformers, attention_mask has to be one of tokens;
        other modules may be given one for each pair of tokens, and True may be either in theirs."""
        if module is self.model:  # begins, or calls itself
            self.told.clear()
        named, tensors = _by_name(module, args, kwargs), [x for _, x in parts_within((args, kwargs))]
        masks = {name: x for name, x in named.items() if name.endswith("mask") and _is_of_tokens(x, tensors)}
        clear = {name: x for name, x in masks.items() if x.dtype != torch.bool or name.endswith(PADDING)}
        if module is self.model or isinstance(module, PreTrainedModel):
            clear = named
        elif _of_transformers(module):
            clear = masks
        if self.told:
            self._forget_masks_around(module, named)
        try:
            for side, real in token_masks(module, clear).items():
                self.told[module, side] = None if real is None or real.all() else real
        except PaddingError as error:
            self.told.update({(module, side): error for side in SIDES})
        for name in () if self.told else masks:
            advice = f"call it padding_mask, or {OWN} with numbers"
            self._note_all_counted(f"{name!r} of {type(module).__name__} does not say whether True is padding", advice)
        if self.told.get((module, "image")) is not None:
            self._note_pixels(module, named)

    def _note_all_counted(self, problem: str, advice: str) -> None:
        note = f"{problem}: all rows are counted unless other masks say more ({advice})"
        self.notes += [note] if note not in self.notes else []

    def _note_pixels(self, module: nn.Module, named: Mapping[str, Any]) -> None:
        """In a model that takes text as well, a mask of pixels fits no layer's rows, which is an error."""
        of_patches = (module, "decoder") in self.told
        for name in IMAGE_MASKS if not of_patches and not takes(module, "input_ids") else ():
            if name in named:
                advice = "give images of one size, without it"
                self._note_all_counted(f"{name!r} of {type(module).__name__} is of pixels", advice)

    def _forget_masks_around(self, module: nn.Module, named: Mapping[str, Any]) -> None:
        """Masks of the modules around one that takes its own, and of its calls before, do not go for this call of it;
        those of torch's or transformers' encoder-decoders, which tell their parts less, do."""
        outer = {outer for outer, _ in self.told if isinstance(outer, nn.Transformer) or is_encoder_decoder(outer)}
        masked = any(name.endswith("mask") for name in named)
        knows = isinstance(module, PreTrainedModel) and takes(module, OWN)
        knows |= isinstance(module, nn.TransformerEncoder) and not masked  # a mask of pairs may say padding, too
        if not knows or any(module in {*part.modules()} for part in outer - {module}):
            return
        if not masked and self.told.get((self.model, "decoder")) is not None:
            note = f"{type(module).__name__} is called without a mask in a batch with padding: all its rows are counted"
            self.notes += [note] if note not in self.notes else []
        self.told.update({(module, side): None for side in SIDES})

    def at(self, around: Around) -> Tensor | None:
        """The mask of real tokens at a place: the innermost module's around it that was told. Raises PaddingError."""
        mask = self.find(around)
        if isinstance(mask, PaddingError):
            raise mask
        return mask

    def find(self, around: Around) -> Tensor | PaddingError | None:
        told = [self.told[outer] for outer in around if outer in self.told]
        return next((mask for mask in told if not isinstance(mask, PaddingError)), told[0] if told else None)


def token_masks(model: nn.Module, named: Mapping[str, Any]) -> dict[Side, Tensor | None]:
    """The padding of one call of a module, from its arguments attention_mask and relatives; None: there is none."""
    masks: dict[Side, Tensor | None] = {}
    if any(name.endswith(PADDING) for name in named):
        masks = _key_padding(model, named)
    if OWN in named:
        masks["encoder"] = masks["decoder"] = _token_mask(named, OWN)
    labels = named.get("labels")
    if (masks or DECODER in named or labels is not None) and is_encoder_decoder(model):
        masks.pop("decoder", None)
        if DECODER in named:
            masks["decoder"] = _token_mask(named, DECODER)
        elif isinstance(labels, Tensor) and labels.dim() == 2:
            masks["decoder"] = labels != -100
    if "encoder_hidden_states" in named and not is_encoder_decoder(model):
        masks["encoder"] = _token_mask(named, OF_STATES) if OF_STATES in named else None
    for value in (named[name] for name in IMAGE_MASKS if isinstance(named.get(name), Tensor)):
        masks["image"] = value.flatten(1) != 0  # of pixels: it fits no layer's rows, which is an error
        pixels = named.get("pixel_values")
        if isinstance(pixels, Tensor) and value.shape == pixels.shape[:2] and not takes(model, "input_ids"):
            masks["encoder"] = masks["decoder"] = masks["image"]  # one for each patch
    return masks


def _by_name(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by the names that ``model.forward`` gives them, and masks that lie deeper in them:
    those of samples ``[sequence]``, or of parts of the batch, as one, or in a list if they have several lengths."""
    try:
        signature = inspect.signature(model.forward)
        named = signature.bind_partial(*args, **kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
    except (TypeError, ValueError):  # compiled, or the call itself will say what is wrong with it
        named = dict(kwargs)
    named = {name: value for name, value in named.items() if value is not None}
    masks: dict[str, dict[int, Any]] = {}
    for name, mask in parts_within(named):
        if name.endswith("mask") and mask is not None and mask is named.get(name, mask):
            masks.setdefault(name, {})[id(mask)] = mask
    return named | {name: _joined([*by_id.values()]) for name, by_id in masks.items()}


def _joined(masks: list[Any]) -> Any:
    """``[batch, 1, 1, sequence]`` or ``[batch, sequence, 1]``, which are made to be broadcast, and several masks as one
    of two dimensions."""
    fitting = [x for x in masks if isinstance(x, Tensor) and len(_without_ones(x.shape[1:])) < 2]
    rows = [torch.atleast_2d(x).flatten(1) for x in fitting]
    if len(masks) == 1:
        return rows[0] if rows and masks[0].dim() > 2 else masks[0]
    fit = len(rows) == len(masks) and len({x.shape[1] for x in rows}) == 1
    return torch.cat(rows) if fit else masks


def _is_of_tokens(mask: Any, tensors: Sequence[Any]) -> bool:
    """Whether a mask has a place for each token of one of the tensors, and does not say which token sees which."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    causal = mask.shape == mask.mT.shape and any(torch.equal(mask, part) for part in (mask.tril(), mask.triu(1)))
    others = [x.shape[:2] for x in tensors if isinstance(x, Tensor) and x.dtype != torch.bool and x is not mask]
    return not causal and (mask.shape in others or mask.mT.shape in others)


def _token_mask(named: Mapping[str, Any], name: str) -> Tensor:
    mask, ids = named[name], named.get(name.replace(OWN, "input_ids"))
    if isinstance(mask, Tensor) and isinstance(ids, Tensor) and ids.shape == mask.shape:
        mask = mask.reshape(-1, mask.shape[-1])  # [batch, choices, sequence] of ids that are flattened as well
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        form = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise PaddingError(f"{name} {form}: give it as a tensor [batch, sequence], or set count_padding=True")
    added = mask.is_floating_point() and not (mask > 0).any()  # to scores: 0 at a token, or below
    real = mask == 0 if added or (mask < 0).any() else mask != 0
    if named.keys() & {*CACHES} and isinstance(ids, Tensor):  # the mask begins with the tokens in there
        return real[:, -ids.shape[-1] :]
    return real


def _of_transformers(module: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(module).mro())


def _of_library(module: nn.Module) -> bool:
    return _of_transformers(module) or type(module).__module__.startswith("torch.")


def _key_padding(model: nn.Module, named: Mapping[str, Any]) -> dict[Side, Tensor | None]:
    """torch's own convention: ``*padding_mask`` [batch, sequence], True (or a number below zero) = padding. What
    modules of transformers call ``padding_mask`` is as their attention_mask: 1 = a real token."""
    hf = _of_transformers(model)
    real = {
        name: value != 0 if hf and name == "padding_mask" else ~value if value.dtype == torch.bool else value == 0
        for name, value in named.items()
        if name.endswith(PADDING) and isinstance(value, Tensor)
    }
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    if attentions and not any(module.batch_first for module in attentions):
        real = {name: mask.mT for name, mask in real.items()}  # the model's tokens are [sequence, batch]
    memory = [real.pop(name) for name in [*real] if name.startswith("memory")]
    if type(model).forward is nn.Transformer.forward:  # a class with its own may call its masks otherwise
        sources, targets = (real.get(f"{name}_key_padding_mask") for name in ("src", "tgt"))
        return {"encoder": memory[0] if sources is None and memory else sources, "decoder": targets}
    queries = [*real.values()]
    if takes(model, "src") and takes(model, "tgt") and len(queries) == 1:
        (name,) = real
        problem = f"{name} is of src or of tgt, and nothing says which tokens of both are real"
        raise PaddingError(f"{problem}: {INSTEAD}")
    if any(not torch.equal(queries[0], mask) for mask in queries[1:]):
        raise PaddingError(f"{' and '.join(real)} differ, and whose tokens each describes cannot be told: {INSTEAD}")
    keys = memory or ([] if takes(model, "memory") else queries)
    masks: dict[Side, list[Tensor]] = {"decoder": queries, "encoder": keys}
    return {side: fitting[0] for side, fitting in masks.items() if fitting}


def sides_of(run: Run) -> Mapping[nn.Module, Around]:
    """Module -> the modules around it, and itself, that may be told of padding, and on which side of each it is; the
    model, whose output may be that of any of them, has all of them, the outermost first.

    These are all down to the blocks, without attention, which takes masks of what is attended to. A model of
    transformers that takes attention_mask is told there: what it makes of it for its modules has other senses.
    """
    model, blocks = run.model, run.plan.blocks
    sides: dict[nn.Module, list[tuple[nn.Module, Side]]] = {module: [] for module in model.modules()}
    if run.config.count_padding:
        return sides
    inside = {module for block in blocks if block is not model for module in block.modules()}.difference(blocks)
    for around in model.modules():
        if around in inside or isinstance(around, nn.MultiheadAttention) or not any(True for _ in around.children()):
            continue
        for module, side in _sides(around).items():
            sides[module].insert(0, (around, side))
        if around is not model:
            sides[model].append((around, "decoder"))
        if isinstance(around, PreTrainedModel) and takes(around, OWN):
            inside.update(around.modules())
    return sides


def _sides(model: nn.Module) -> dict[nn.Module, Side]:
    """The side of each module: the encoder of an encoder-decoder, an image encoder in a text model, or else the
    decoder."""
    sides: dict[nn.Module, Side] = dict.fromkeys(model.modules(), "decoder")
    for module in model.modules() if takes(model, "input_ids") else ():
        if takes(module, "pixel_values") and not takes(module, "input_ids"):
            sides.update(dict.fromkeys(module.modules(), "image"))
    if isinstance(model, nn.Transformer) or is_encoder_decoder(model):
        encoder = model.encoder if isinstance(model, nn.Transformer) else model.get_encoder()  # type: ignore[operator] - not on nn.Module
        sides.update(dict.fromkeys(encoder.modules(), "encoder"))
    return sides


# hooks that see the inputs of layers ----------------------------------------------------------------------------------


See = Callable[[Layer, tuple[Tensor, ...], TokenMasks], None]


class PaddingOfInputs:
    """Finds the token mask of a layer's input in the call of the model that runs now. ``masks``: those of that call.

    Register `on_block` as a pre-hook of every block (it remembers the encoder's states) and `on_router` as a hook of
    routers (it remembers the token of each sorted row).
    """

    def __init__(self, sides: Mapping[nn.Module, Around]) -> None:
        self._sides = sides
        self.masks = PaddingOfCall()
        self._from_encoder: list[Tensor] = []  # what a decoder block is given beside its hidden states
        self._hidden_shape: torch.Size | None = None  # of these, without their width
        self._token_of_row: dict[nn.Module, Tensor] = {}  # router -> the token of each row that it has sorted

    def on_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden, *others = (*args, *kwargs.values()) or (None,)
        self._from_encoder = [x for x in others if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]
        self._hidden_shape = hidden.shape[:-1] if isinstance(hidden, Tensor) else None
        if any(state.shape[:-1] == self._hidden_shape for state in self._from_encoder) and not _of_library(block):
            self._note_masks_that_differ(block)

    def _note_masks_that_differ(self, block: nn.Module) -> None:
        """Of two inputs of one length: what the block makes of the second, or gives first, has the other's shape."""
        inner, outer = (self.masks.find([(part, side) for part, _ in self._sides[block]]) for side in SIDES[:2])
        if inner is not outer and not (isinstance(inner, Tensor) and isinstance(outer, Tensor) and inner.equal(outer)):
            problem = f"{type(block).__name__} is given two inputs of one length, with masks that differ"
            note = f"{problem}: what it makes of the second before a layer reads it is taken for the first"
            self.masks.notes += [note] if note not in self.masks.notes else []

    def on_router(self, router: nn.Module, args: tuple, output: Any) -> None:
        self._token_of_row[router] = output[1]

    def token_mask(self, module: nn.Module, layer: Layer, x: Tensor) -> Tensor | None:
        """The token mask of an input of a layer, shaped like its leading dimensions; None if every token is real."""
        around: Around = self._sides[module]
        if any(self._is_of(x, state) for state in self._from_encoder):
            around = [(outer, "encoder") for outer, _ in around]
        if (mask := self.masks.at(around)) is None:
            return None
        mask = mask.to(x.device)
        if layer.router is not None:
            return mask.flatten()[self._token_of_row[layer.router]]
        if layer.adapter is not CONV:  # a convolution's rows are patches
            if _without_ones(x.shape[:-1]) == _without_ones(mask.shape):  # DeepSeek's latents are [B, 1, S, C]
                return mask.view(x.shape[:-1])
            if x.dim() == 2 and x.shape[0] == mask.numel() and layer.mixture is None:  # experts have an order of theirs
                return mask.flatten()
        problem = f"layer {layer.name!r} gets an input of shape {list(x.shape)}, the token mask has {list(mask.shape)}"
        raise PaddingError(f"{problem}: which of its rows are padding cannot be told; {INSTEAD}")

    def _is_of(self, x: Tensor, state: Tensor) -> bool:
        """Whether an input is what an encoder gave, or was made of it: that is seen where it is longer or shorter than
        the hidden states."""
        same = x.data_ptr() == state.data_ptr() and x.shape == state.shape
        return same or x.shape[:-1] == state.shape[:-1] != self._hidden_shape


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


@contextmanager
def input_hooks(
    layer_plans: Iterable[LayerPlan], blocks: Sequence[nn.Module], sides: Mapping[nn.Module, Around], see: See
) -> Iterator[PaddingOfInputs]:
    """While entered, ``see(layer, inputs, token_masks)`` is called for all inputs of the layers, in the model or in
    ``blocks`` by themselves. What this gives is to be told the masks of each call of the model."""
    padding = PaddingOfInputs(sides)
    layers: dict[nn.Module, list[Layer]] = {}
    for layer_plan in layer_plans:
        for module in layer_plan.layer.hooked_modules:
            layers.setdefault(module, []).append(layer_plan.layer)
    inside = False

    def on_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal inside
        if inside:  # an adapter is running the module to see behind it
            return
        inside = True
        try:
            # a user's loop may run the model in inference mode, whose tensors could not be added to later
            with torch.inference_mode(False), torch.no_grad():
                for layer in layers[module]:
                    inputs = tuple(map(dense_rows, layer.adapter.inputs(module, args, kwargs)))
                    for x in inputs:
                        if isinstance(x, Unknown):  # by another way than the arguments of its block
                            x.need()
                    see(layer, inputs, [padding.token_mask(module, layer, x) for x in inputs])
        finally:
            inside = False

    routers = {layer.router for module_layers in layers.values() for layer in module_layers if layer.router is not None}
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(padding.on_block, with_kwargs=True))
        for module in layers:
            hooks.enter_context(module.register_forward_pre_hook(on_layer, with_kwargs=True))
        for router in routers:
            hooks.enter_context(router.register_forward_hook(padding.on_router))
        yield padding


def input_key(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple:
    """A key that two layers' inputs have in common while both are alive: the same objects, with nothing written to them
    in between, that meet the weights in the same way."""
    uncounted = layer.name if any(x.is_inference() for x in inputs) else None  # writes to such tensors
    return (*((id(x), version(x)) for x in inputs), layer.adapter.signature(layer.owner), uncounted)


def record_outputs(
    run: Callable[[], Any], modules: Sequence[nn.Module], hold: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Tensor]:
    """The first output tensor of each of the ``modules`` in what ``run`` runs, each held as soon as it is there."""
    outputs: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = hold(dense_rows(flat_tensors(output)[0]))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(see))
        run()
    return [outputs[module] for module in modules]


# the model and its data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NumberedCall:
    """Call ``number`` of the model in this process, and its padding. ``random``: the states of the random numbers that
    it begins with; None: they follow from its number."""

    number: int
    call: Call
    masks: PaddingOfCall
    random: list[Any] | None = None


Begin = Callable[[NumberedCall], object]  # gets each call of the model before it runs


NONE_WRITTEN = "the model writes no text itself"


@dataclass
class CalibrationData:
    """The model of a run, and the calls of it that are this process's share of the calibration data.

    calls: None for a forward_loop, whose calls are not known before it runs.
    written: how many calls of all processes, the first ones, hold text that the model has written itself.
    metrics: block -> R, which errors of its output are measured with (accuracy/fisher.py); the plain ones without.
    sha256: of the data of all processes, if it is known before the model runs.
    dense: what running the dense model has shown, if that was asked for before (calibration/dense.py).
    """

    run: Run
    calls: list[Call] | None
    sha256: str | None = None
    written: int = 0
    metrics: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    dense: Any = None

    @classmethod
    def load(cls, run: Run, calls: list[Call] | None = None) -> "CalibrationData":
        """Read the data, unless ``calls`` has all of it, and take this process's share."""
        run.report.calibration["source"] = source_of(run.config)
        if run.config.forward_loop is not None:
            _self_written(None, run)
            return cls(_settled(run, own_text=False), None)
        if run.config.writes_its_data:
            calls = _written(run, lambda: calls_from_nothing(run.model, run.config, run.processes))
        elif calls is None:
            calls = load_calls(run.config, run.model, run.report.notes)
        written, processes = _self_written(calls, run), run.processes
        shared, sha256 = run.config.split_data and processes.size > 1, None
        if shared and run.config.tunes:
            sha256 = digest_of([*written, *calls])
            calls, written = split_steps(calls, processes.size), split_steps(written, processes.size, -len(written))
        calls = [*written, *calls]
        if shared:
            sha256 = sha256 or digest_of(calls)
            _check_share(calls, sha256, run)
            calls = calls[processes.rank :: processes.size]
        elif processes.size > 1:  # steps of processes that have data of their own are others
            calls = [
                call if call.step is None else replace(call, step=call.step * processes.size + processes.rank)
                for call in calls
            ]
        return cls(_settled(run, own_text=bool(written)), calls, sha256, len(written))

    def only(self, numbers: Sequence[int]) -> "CalibrationData":
        """The user's calls with these numbers alone."""
        assert self.calls is not None
        dense = self.dense and self.dense.only(numbers)
        return replace(self, calls=[self.calls[number] for number in numbers], written=0, dense=dense)

    @cached_property
    def sides(self) -> Mapping[nn.Module, Around]:
        return sides_of(self.run)

    def masks_of(self, call: Call, part: nn.Module | None = None) -> PaddingOfCall:
        """The padding of a call of the model, as far as its arguments tell it; or of a ``part`` by itself, whose
        masks are those of the model meanwhile."""
        model, part = self.run.model, self.run.model if part is None else part
        masks = PaddingOfCall(part, self.run.report.notes)
        if not self.run.config.count_padding:
            masks.tell(part, call.args, call.kwargs)
            masks.told |= {(model, side): real for (_, side), real in masks.told.items()}
        masks.first = dict(masks.told)
        return masks

    def run_model(
        self,
        begin: Begin = lambda numbered: None,
        hooks: AbstractContextManager[PaddingOfInputs] | None = None,
        numbers: Collection[int] | None = None,
    ) -> None:
        """Run the whole model over all calls, or over those with these ``numbers``. ``begin`` is called with each,
        ``hooks`` are entered meanwhile."""
        run, calls = self.run, self.calls
        number, masks = -1, PaddingOfCall(run.model)
        under_way: list[nn.Module] = []  # the model, or the part of it that a loop calls by itself, and parts inside
        told = {run.model, *(module for module, _ in self.sides[run.model])}
        parts = [part for part in run.model.modules() if part in told or isinstance(part, PreTrainedModel)]

        def on_call(module: nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal number, masks
            under_way.append(module)
            if len(under_way) > 1:
                if module in told and not run.config.count_padding:
                    masks.tell(module, args, kwargs)
                return
            call = Call(args, kwargs) if calls is None else replace(calls[number], args=args, kwargs=kwargs)
            masks = self.masks_of(call, module)
            if padding is not None:
                padding.masks = masks
            if module is run.model:
                number += calls is None
                begin(NumberedCall(number, call, masks))

        def after_call(*_: Any) -> None:
            under_way.pop()
            if not under_way and padding is not None:
                padding.masks = PaddingOfCall(run.model)

        with ExitStack() as contexts:
            contexts.enter_context(onloaded_blocks(run))
            # they see what blocks and layers are given, on the device, in its own precision
            padding = None if hooks is None else contexts.enter_context(hooks)
            contexts.enter_context(forward_context(run))
            for part in parts:
                first = part is run.model
                contexts.enter_context(part.register_forward_pre_hook(on_call, with_kwargs=True, prepend=first))
                contexts.enter_context(part.register_forward_hook(after_call, always_call=True))
            if run.config.forward_loop is not None:
                run.config.forward_loop(run.model)
                return
            assert calls is not None
            for number in range(len(calls)) if numbers is None else numbers:
                call_model(run, calls[number], number)

    def output_of(self, number: int) -> tuple[Any, Tensor | None]:
        """Run the call of this number -> (the model's output, the mask of its real tokens)."""
        outputs: list[Any] = []
        seen: list[NumberedCall] = []
        with self.run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
            self.run_model(seen.append, numbers=[number])
        return outputs[0], seen[0].masks.at(self.sides[self.run.model])

    def counted(self, output: Any, token_mask: Tensor | None = None) -> Output:
        """The part of a model's output that is compared. The report says by what, unless that is KL."""
        counts = Output.of(output, self.run.config.output, self.run.config.divergence, token_mask)
        if counts.by != "kl":
            self.run.report.settings["divergence"] = name_of(counts.by)
        return counts


@contextmanager
def onloaded_blocks(run: Run) -> Iterator[None]:
    """While entered, each block moves to the execution device, if the user asked for one, for each of its calls."""
    with ExitStack() as contexts:
        for block in run.plan.blocks:
            if run.config.device is not None and block is not run.model:
                contexts.enter_context(onloaded(block, run.config.device, resident=False))
        yield


def call_model(run: Run, call: Call, number: int, random: Sequence[Any] | None = None) -> None:
    """Call ``number`` of the model in this process. Each time it draws the same random numbers: from the states
    ``random``, or as its number says."""
    device = input_device(run.model)
    seed = (torch.initial_seed() + _step_of(run, call, number) + call.row) % 2**63
    with errors_name_batch(run, call, number), drawing_from(seed if random is None else random):
        args, kwargs = map_batch(lambda x: x.to(device), (call.args, call.kwargs))
        run.model(*args, **kwargs)


def _step_of(run: Run, call: Call, number: int) -> int:
    """The step of the optimizer that a call is a part of, by its number among those of all processes."""
    return number * run.processes.size + run.processes.rank if call.step is None else call.step


NOT_OF_THE_BATCH = (PaddingError, OutputError, Unreadable, OSError, SafetensorError)  # what no batch is to blame for


@contextmanager
def errors_name_batch(run: Run, call: Call, number: int) -> Iterator[None]:
    """An error of the user's model names the batch that it was called with."""
    try:
        yield
    except NOT_OF_THE_BATCH:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            size = f"a batch of {batch_rows(call.args, call.kwargs)}{' windows' * run.config.holds_text}"
            names = {block: name for name, block in run.plan.named_blocks.items() if name}
            selves = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
            block = next((names[obj] for obj in selves if isinstance(obj, nn.Module) and obj in names), None)
            where = f"{type(run.model).__name__} outside of its blocks" if block is None else f"block {block!r}"
            advice = "batch_size=1, or spill=True where the checkpoint is streamed"
            raise MemoryError(f"no memory for {size} in {where}: {advice}") from error
        shapes = map_leaves(_described, {**dict(enumerate(call.args)), **call.kwargs})
        batch = f"calibration batch {_step_of(run, call, number) if call.batch is None else call.batch}, {shapes}"
        problem = f"{type(run.model).__name__} cannot take {batch}: {type(error).__name__}: {error}"
        raise ValueError(f"{problem}. Give batches that model(**batch) takes, or a collect_func") from error


def _described(value: Any) -> Any:
    """Dtype and shape of a tensor, or of an array of numpy, as messages show them."""
    numpy = isinstance(value, np.ndarray)
    return f"{'numpy ' * numpy}{value.dtype} {list(value.shape)}" if numpy or isinstance(value, Tensor) else value


def _settled(run: Run, *, own_text: bool) -> Run:
    """The run with the options of `Reconstruct` for its data, which the report names."""
    config = run.config
    if config.reconstruct is None:
        return run
    options = config.reconstruct.settled(own_text=own_text, may_move=config.masks is None)
    run = replace(run, config=replace(config, reconstruct=options))
    run.report.settings["reconstruct"] = run.config.settings()["reconstruct"]
    return run


def _self_written(calls: list[Call] | None, run: Run) -> list[Call]:
    """Batches of text that the dense model writes, or of joined rows, with a note of it, or of why there is none, in
    the report.

    calls: those of the user's data; None for a forward_loop.
    """
    if not run.config.self_data:
        return []
    if run.config.self_data in OWN_WINDOWS and (why := why_no_text(calls, run)) is not None:
        if run.config.self_data == "auto" and calls is not None and run.config.split_data and run.storage.resident:
            made = joined(calls, held_back(calls), OWN_WINDOWS["auto"], run.config.seed)
            if rows := sum(batch_rows(call.args, call.kwargs) for call in made):
                run.report.notes.append(f"{rows} further rows are joined from two of the data's each: {why}")
                return made
        run.report.notes += [f"{NONE_WRITTEN}: {why}"] if why else []
        return []
    assert calls is not None
    return _written(run, lambda: own_calls(run.model, calls, held_back(calls), run.config, run.processes))


def _written(run: Run, write: Callable[[], list[Call]]) -> list[Call]:
    """Run ``write``, which lets the model write text, and note in the report how much it wrote."""
    began = time.perf_counter()
    with forward_context(run):
        calls = write()
    seconds, rows = time.perf_counter() - began, token_rows(calls)
    run.report.notes.append(f"the dense model wrote {len(rows)} windows of text itself, in {seconds:.0f} s")
    if problem := monotonous(rows):
        warnings.warn(problem, stacklevel=2)
        run.report.notes.append(problem)
    return calls


def _check_share(calls: list[Call], sha256: str, run: Run) -> None:
    """Raise ValueError unless all processes have the same data, and enough of it to share."""
    facts = {"the number of calibration batches": len(calls), "the SHA-256 of the calibration data": sha256}
    advice = "give all of them the same batches in the same order (a shuffling DataLoader needs one seed)"
    run.processes.check_same(facts, f"{advice}; or split_data=False, if what each of them gives is its share")
    if len(calls) < run.processes.size:
        problem = f"{run.processes.size} processes share out the calibration batches, and there are only {len(calls)}"
        raise ValueError(f"{problem}: give smaller batches")


# what forwards run in -------------------------------------------------------------------------------------------------


@contextmanager
def forward_context(run: Run) -> Iterator[None]:
    """Context for forwards: every module is called, in the precision that the user asked for, on every device that the
    model or a part of it runs on. No solver runs in it."""
    config, mha = run.config, torch.backends.mha
    with ExitStack() as contexts:
        contexts.enter_context(in_float32(run.widened))
        # nn.TransformerEncoder and nn.MultiheadAttention have a fused path that reads the weights of modules inside
        # them without calling these, and packs padded batches into nested tensors
        contexts.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        if config.autocast is not None:
            types = {p.device.type for p in run.model.parameters() if not p.is_meta} | {"cpu"}
            types |= {config.device.type} if config.device is not None else set()
            for device_type in sorted(types):
                # reconstruction changes weights in this context: no copy of them may be held
                dtype = getattr(torch, config.autocast)
                contexts.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        yield
