"""Quantized checkpoints, which hold codes in the place of weights, and their dequantization by transformers.

transformers dequantizes at load, tensor by tensor, if the quantization settings say ``dequantize``. This file adds what
is missing:

- which folders transformers dequantizes correctly;
- the dtype and size of the dense weights;
- that the loaded model no longer says it is quantized.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from modelopt_sparse.checkpoint.folder import generation_of, is_packed, weight_files
from modelopt_sparse.checkpoint.packed import plain_tensors
from modelopt_sparse.model.hf import FLOATS, forget_quantization, method_of, parts_of, quantization_of
from modelopt_sparse.reports.text import first_few

METHODS = ("fp8", "mxfp4")  # those that transformers dequantizes on any device and without other packages
# safetensors' names of the floating point dtypes of dense weights, which are those of FLOATS
DENSE = dict(zip(("F16", "BF16", "F32", "F64"), FLOATS))
SHOWN = 3  # how many tensors an error names

Headers = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> safetensors' name of its dtype, and its shape
INSTEAD = "sparsify the model that it was made of, and quantize after"
TRANSFORMERS = f"transformers {transformers.__version__}"


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint, and the dense weights that it is dequantized to.

    method: the quantization, "fp8" or "mxfp4".
    dtype: of the dense weights.
    size: bytes of the dense weights.
    stored: bytes of the checkpoint's files; None if they are not on this machine.
    """

    method: str
    dtype: torch.dtype
    size: int
    stored: int | None

    def __str__(self) -> str:
        before = "" if self.stored is None else f" instead of {gib(self.stored)}"
        return f"dequantized from {self.method} to {str(self.dtype).removeprefix('torch.')}: {gib(self.size)}{before}"


def gib(size: int) -> str:
    """A number of bytes as text, in GiB, or in MiB below 1 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def dequantization_of(model: nn.Module, source: str | Path, dtype: Any, *, dequantize: bool) -> Quantized | None:
    """How the checkpoint ``source`` is dequantized; None if it is not quantized.

    ``model`` is its model on the meta device; ``dtype`` and ``dequantize`` are what the user asks for. Raises
    ValueError if the checkpoint is quantized and

    - the user does not ask for ``dequantize``, or
    - transformers would not dequantize all of it correctly,

    and if the user asks for ``dequantize`` and it is not quantized.
    """
    config = getattr(model, "config", None)
    quantization = quantization_of(config)
    if quantization is None:
        if dequantize:
            raise ValueError(f"{str(source)!r} is not quantized: leave dequantize=True out")
        return None
    method = method_of(quantization)
    where = f"{str(source)!r} is quantized ({method})"
    if method not in METHODS:
        raise ValueError(f"{where}; {' and '.join(METHODS)} are dequantized here: {INSTEAD}")
    if is_packed(Path(source)):
        raise ValueError(f"{where} and packed: unpack it first")
    files = _files(source)
    stored = sum(file.stat().st_size for file in files) if files else None
    dense = _dense_dtype(dtype, config)
    size = sum(parameter.numel() for parameter in model.parameters()) * dense.itemsize
    quantized = Quantized(method, dense, size, stored)
    if not dequantize:
        raise ValueError(f"{where}: give dequantize=True to have it {quantized}; or {INSTEAD}")
    _refuse_what_goes_wrong(where, files, quantization)
    return quantized


def load_dequantized(architecture: Any, folder: Path, config: Any, quantized: Quantized, **options: Any) -> Any:
    """The dequantized model.

    ``quantized`` is what `dequantization_of` returned, and ``options`` are those of ``from_pretrained``. Raises
    ValueError if transformers cannot load the folder, or does not dequantize all of it.
    """
    quantization = quantization_of(config) or {}
    where = f"{str(folder)!r} is quantized ({quantized.method})"
    if not _files(folder):
        raise ValueError(f"{where} and does not hold all of its safetensors files")
    generation_of(folder)
    forget_quantization(config)
    config.quantization_config = {**quantization, "dequantize": True}
    options = {**options, "config": config, "dtype": quantized.dtype, "output_loading_info": True}
    try:
        model, info = architecture.from_pretrained(folder, **options)
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"{where}, and {TRANSFORMERS} cannot dequantize it, a newer one may: {error}") from error
    left = {*info["missing_keys"], *info["unexpected_keys"]}
    left |= {name for name, parameter in model.named_parameters() if parameter.dtype not in FLOATS}
    if left:
        shown = first_few(sorted(left), SHOWN)
        raise ValueError(f"{where}, and {TRANSFORMERS} does not dequantize all of it, a newer one may: {shown}")
    forget_quantization(model.config)
    wide = kept_wide(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:  # some versions of transformers leave a weight in the dtype of its scales
            parameter.data = parameter.data.to(dtype_of(name, wide, quantized.dtype))
    save_as_dense(model)
    return model


def save_as_dense(model: nn.Module) -> None:
    """Make save_pretrained write a dequantized model as a dense one.

    save_pretrained reverts the conversions that transformers recorded at load: it would quantize the model again, or
    fail. Without that record it applies the conversions of the model's class, which are right.
    """
    conversions = model.__dict__.get("_weight_conversions") or ()
    operations = (operation for conversion in conversions for operation in getattr(conversion, "operations", ()))
    if any(getattr(operation, "hf_quantizer", None) is not None for operation in operations):
        del model._weight_conversions


def kept_wide(model: Any) -> Mapping[str, torch.dtype]:
    """Globs of parameters -> their dtype, for those that do not have the model's (T5's ``wo``: float32 in float16)."""
    plan = getattr(model, "_get_dtype_plan", None)
    return model.dtype_plan if plan is None else plan(model.config.dtype)  # the first of the two in transformers 5.0


def dtype_of(name: str, wide: Mapping[str, torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in a model of ``dtype``; ``wide`` is from `kept_wide`."""
    return next((d for glob, d in wide.items() if re.search(glob.replace("*", ".*"), name)), dtype)


def _dense_dtype(dtype: Any, config: Any) -> torch.dtype:
    """``from_pretrained``'s ``dtype`` as a torch.dtype.

    None and "auto" are the dtype in the config, or bfloat16, as in transformers, if it names none.
    """
    if dtype is None or dtype == "auto":
        stored = next((part.dtype for part in parts_of(config) if getattr(part, "dtype", None) is not None), None)
        return stored if stored in FLOATS else torch.bfloat16
    dense = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dense not in FLOATS:
        raise ValueError(f"dtype={dtype!r}: weights are dequantized to {', '.join(str(x) for x in FLOATS)}")
    return dense


def _files(source: str | Path) -> list[Path]:
    """The weight files of a folder; [] if one of them is missing, or if ``source`` is a name on the hub."""
    folder = Path(source)
    files = [folder / name for name in weight_files(folder)] if folder.is_dir() else []
    return files if all(file.is_file() for file in files) else []


def _refuse_what_goes_wrong(where: str, files: list[Path], quantization: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors that transformers would not dequantize correctly. Only headers of files are read."""
    entries = [named for file in files for named in plain_tensors(file).items()]
    tensors: Headers = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries}
    block = quantization.get("weight_block_size", (128, 128))
    fits = partial(_is_fp8, block) if method_of(quantization) == "fp8" else _is_mxfp4
    codes = sorted(name for name, (dtype, _) in tensors.items() if dtype not in DENSE)
    if wrong := [f"{name!r}, {tensors[name][0]} {list(tensors[name][1])}" for name in codes if not fits(name, tensors)]:
        shown = first_few(wrong, SHOWN)
        raise ValueError(f"{where}, and {TRANSFORMERS} would not dequantize all of it rightly: {shown}; {INSTEAD}")


def _is_fp8(block: Sequence[int] | None, name: str, tensors: Headers) -> bool:
    """Whether transformers dequantizes an fp8 weight correctly: codes of its format, with scales that fit.

    If blocks do not divide the matrix evenly, transformers assumes another size of block, without an error.
    """
    dtype, shape = tensors[name]
    kind, grid = tensors.get(f"{name}_scale_inv", ("", ()))
    if dtype != "F8_E4M3" or kind not in DENSE:
        return False
    if block is None:
        return torch.Size(grid).numel() == 1
    whole = all(size % part == 0 or size <= part for size, part in zip(shape[-2:], block))
    expected = (*shape[:-2], *(max(size // part, 1) for size, part in zip(shape[-2:], block)))
    return whole and len(shape) >= 2 and grid == expected


def _is_mxfp4(name: str, tensors: Headers) -> bool:
    """Whether transformers dequantizes an mxfp4 weight correctly: blocks with the scales that belong to them."""
    stem = name.removesuffix("_blocks").removesuffix("_scales")
    blocks, scales = (tensors.get(f"{stem}_{part}", ("", ()))[1] for part in ("blocks", "scales"))
    return tensors[name][0] == "U8" and blocks == (*scales, 16)
