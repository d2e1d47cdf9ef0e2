"""The inputs of the command line: options from YAML, --set and flags, and the model that MODEL names."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils import has_file

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import documents_of, opened
from modelopt_sparse.checkpoint.dequantize import Quantized, dequantization_of, load_dequantized
from modelopt_sparse.checkpoint.folder import DESCRIPTION
from modelopt_sparse.checkpoint.streamed import local_folder
from modelopt_sparse.cli.names import DTYPES
from modelopt_sparse.distributed import own_device
from modelopt_sparse.model.hf import empty_model, model_class, quantization_of
from modelopt_sparse.plan.options import SELF, is_data_set
from modelopt_sparse.values import read_yaml

PYTHON_ONLY = (
    "data_loader",
    "collect_func",
    "forward_loop",
    "tokenizer",
    "processor",
    "masks",
)  # options that no YAML file can hold


def settings_of(
    flags: dict[str, Any], config: Path | None = None, options: list[str] | None = None, *, check_device: bool = True
) -> dict[str, Any]:
    """The API's options, and ``method``, from the command line.

    They come from the YAML file ``config``, from ``options`` (--set), and from ``flags``; a later one of these wins.
    ``check_device``: whether the device must be there. Raises ValueError for input that cannot be used.
    """
    settings: dict[str, Any] = {}
    if config is not None:
        if not config.is_file():
            raise ValueError(f"--config {str(config)!r} is not a file")
        loaded = read_yaml(config.read_text(encoding="utf-8"), f"--config {str(config)!r}")
        if not isinstance(loaded, dict):
            raise ValueError(f"--config {str(config)!r} must hold a mapping of options")
        settings.update(loaded)
    for option in options or []:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ValueError(f"--set {option!r}: write KEY=VALUE")
        settings[key] = read_yaml(value, f"--set {option!r}")
    for key in settings.keys() & set(PYTHON_ONLY):
        raise ValueError(f"option {key!r} is a Python object; on the command line use --data FILE")
    known = {"method", *mts.SparsifyConfig.names()}
    settings.update({key: value for key, value in flags.items() if key in known and value is not None})
    settings.setdefault("method", None)
    if settings.get("data", SELF) != SELF:
        settings["data"] = data_of(settings["data"], "train")
    if settings.get("device") is not None:
        settings["device"] = own_device(settings["device"])
    if check_device and settings.get("device") is not None:
        _check_device(settings["device"])
    return settings


def data_of(name: str | Path, split: str) -> Any:
    """The text that --data or --eval names: a file, or the opened data set of this name or in this folder.

    split: of a data set whose name says none. Raises ValueError for what is none of them, before weights are read.
    """
    path = Path(name)
    if path.is_file() or not (path.is_dir() or is_data_set(str(name))):
        data: Any = path
    else:
        data = opened(path if path.is_dir() else str(name), split)
    documents_of(data)
    return data


def _check_device(device: str) -> None:
    """Raise ValueError if nothing can be put on a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {error}") from None


def read_evaluation(path: Path) -> tuple[mts.Evaluation | None, mts.TaskScores | None]:
    """What `eval --json` printed, from the file that it was written to. Raises ValueError for anything else."""
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        tasks = measured.pop("tasks", None)
        if not measured and tasks is None:
            raise ValueError("it holds nothing")
        return (
            mts.Evaluation.from_dict(measured) if measured else None,
            None if tasks is None else mts.TaskScores.from_dict(tasks),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"--evaluation {str(path)!r} is not what `eval --json` printed: {error}") from None


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of --dtype; None for auto. Raises ValueError for one that is not known."""
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: allowed are {', '.join(DTYPES)}")
    return None if name == "auto" else getattr(torch, name)


class NamedModel:
    """MODEL of the command line, a folder or a hub name, and how to load it.

    Raises ValueError for a dtype that is not known, and if there is no such model.
    """

    def __init__(
        self, name: str, dtype: str, revision: str | None, trust_remote_code: bool, progress: bool | None = None
    ) -> None:
        torch_dtype(dtype)
        if progress:
            transformers.utils.logging.enable_progress_bar()
        self.name, self.dtype = name, dtype
        self.remote = {"trust_remote_code": trust_remote_code}
        self.hub = {"revision": revision, **self.remote}
        self._check()

    def _check(self) -> None:
        """Raise ValueError if there is no config.json. transformers itself would try again for half a minute."""
        where = "is neither a folder nor a model that the hub gives"
        try:
            is_there = has_file(self.name, "config.json", revision=self.hub["revision"])
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name!r} {where}: {error}") from None
        if not is_there and Path(self.name).is_dir():
            raise ValueError(f"{self.name!r} holds no config.json: it is not a folder of a transformers model")
        if not is_there:
            raise ValueError(f"{self.name!r} {where}: it is not there, not a model, or there is no connection")

    def empty(self, dequantize: bool, *, read: bool = False) -> tuple[nn.Module, Quantized | None]:
        """(the model on the meta device, in the dtype that it will have; how it is dequantized, or None).

        ``read``: its weights will be read next, so that those of a quantized model on the hub may be downloaded here.
        """
        network = empty_model(self.name, **self.hub)
        known = dequantize and read and quantization_of(network.config) is not None
        where = local_folder(self.name, self.hub["revision"], self.remote) if known else self.name
        quantized = dequantization_of(network, where, self.dtype, dequantize=dequantize)
        dtype = (
            torch_dtype(self.dtype) or getattr(network.config, "dtype", None) if quantized is None else quantized.dtype
        )
        return network if dtype is None else network.to(dtype), quantized

    def load(self, device: str = "cpu", quantized: Quantized | None = None, *, masks: bool = False) -> nn.Module:
        """The model with its weights; ``masks``: with those of a folder that `save` wrote, and with its report."""
        if masks and (Path(self.name) / DESCRIPTION).is_file():
            return mts.load(self.name, dtype=self.dtype, **self.hub).to(device)
        config = AutoConfig.from_pretrained(self.name, **self.hub)
        architecture = model_class(config, self.name)
        if quantized is not None:
            folder = local_folder(self.name, self.hub["revision"], self.remote)
            return load_dequantized(architecture, folder, config, quantized, **self.remote)[0].to(device)
        return architecture.from_pretrained(self.name, dtype=self.dtype, **self.hub).to(device)

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.name, **self.hub)

    def companions(self) -> list[Any]:
        """The model's tokenizer (with its chat template) and processor, those of them that it has."""
        companions = []
        loaders: list[Callable[..., Any]] = [AutoTokenizer.from_pretrained, AutoProcessor.from_pretrained]
        for loader in loaders:
            try:
                companions.append(loader(self.name, **self.hub))
            except (OSError, ValueError, KeyError):
                continue
            except ImportError as error:
                warnings.warn(f"left behind, for it cannot be loaded here: {error}", stacklevel=2)
        return companions
