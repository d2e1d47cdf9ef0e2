"""Which tokens of a call of the model are padding: what the arguments of the model and of parts of it say, and which of
that goes for the input of a layer.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.model.devices import parts_within
from modelopt_sparse.model.hf import CACHES, is_encoder_decoder, takes
from modelopt_sparse.model.layers import CONV, Layer
from modelopt_sparse.run import Run

INSTEAD = "give batches without padding, or set count_padding=True to let padding into the statistics"
OWN, DECODER, IMAGE_MASKS = "attention_mask", "decoder_attention_mask", ("pixel_attention_mask", "pixel_mask")
OF_STATES = "encoder_attention_mask"  # of encoder_hidden_states
PADDING = ("padding_mask", "pad_mask")  # in masks whose names end like these True is padding
SQUARE = "a batch has as many texts as tokens: if the model transposes them (XLNet), give another batch size"


class PaddingError(ValueError):
    """Which rows are padding cannot be told."""


Side = Literal["encoder", "decoder", "image"]
SIDES: tuple[Side, ...] = ("encoder", "decoder", "image")
Around = Sequence[tuple[nn.Module, Side]]  # the modules around a place, the innermost first, and the side it is on


# of a call of the model ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PaddingOfCall:
    """The padding of one call of ``model``, or of a part that a loop calls by itself, of which its modules are told
    while the call runs.

    told: (module, side) -> which tokens are real, as the arguments say that the module was called with; None: all; an
    error if they do not say so. A module that is no encoder-decoder has its own tokens on its decoder's side, and those
    that it attends to on the encoder's. ``image`` is for the image encoder beside or inside of a text model, which text
    padding says nothing about.
    first: what the arguments of the call itself say.
    notes: of the report, which get what is not known for certain.
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

    def of_all(self) -> bool:
        """Whether all tokens are padding."""
        return bool(self.told) and all(isinstance(x, Tensor) and not x.any() for x in self.told.values())

    def note(self, text: str) -> None:
        """Say it once in the report."""
        self.notes += [text] if text not in self.notes else []

    def _note_all_counted(self, problem: str, advice: str) -> None:
        self.note(f"{problem}: all rows are counted unless other masks say more ({advice})")

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
            called = f"{type(module).__name__} is called without a mask in a batch with padding"
            self.note(f"{called}: all its rows are counted")
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


# of the input of a layer ----------------------------------------------------------------------------------------------


class PaddingOfInputs:
    """Finds the token mask of a layer's input in the call of the model that runs now. ``masks``: those of that call.

    Register `on_block` as a pre-hook of every block (it remembers the encoder's states) and `on_router` as a hook of
    routers (it remembers the token of each sorted row).
    """

    def __init__(self, sides: Mapping[nn.Module, Around]) -> None:
        self._sides = sides
        self.masks, self._thread = PaddingOfCall(), None
        self._from_encoder: list[Tensor] = []  # what a decoder block is given beside its hidden states
        self._hidden_shape: torch.Size | None = None  # of these, without their width
        self._token_of_row: dict[nn.Module, Tensor] = {}  # router -> the token of each row that it has sorted

    def begin(self, masks: PaddingOfCall) -> None:
        """A call of the model begins, in this thread."""
        self.masks, self._thread = masks, get_ident()

    def refuse_unseen(self, layer: Layer) -> None:
        """Raise PaddingError if a layer runs in another thread than the call that has begun, or has inputs without
        values."""
        if self._thread not in (None, get_ident()):
            raise PaddingError(f"layer {layer.name!r} runs in another thread than its model: calibrate in one thread")
        if torch._C._are_functorch_transforms_active():
            problem = f"layer {layer.name!r} runs inside of torch.func (vmap, grad), which hides what it is given"
            raise PaddingError(f"{problem}: calibrate a model that calls it plainly, or take method='magnitude'")

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
            self.masks.note(f"{problem}: what it makes of the second before a layer reads it is taken for the first")

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
                if mask.shape == mask.mT.shape and isinstance(self.masks.model, PreTrainedModel):
                    self.masks.note(SQUARE)
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
