"""The inputs of a command: options from YAML, --set and flags, text, and the model that MODEL names."""

import json
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils import has_file

import modelopt_sparse as mts
from modelopt_sparse.calibration.data import documents_of, open_dataset, tokens_of
from modelopt_sparse.checkpoint.dequantize import Quantized, dequantization_of, load_dequantized
from modelopt_sparse.checkpoint.folder import DESCRIPTION, TOKENIZER
from modelopt_sparse.checkpoint.packed import loaded
from modelopt_sparse.checkpoint.streamed import local_folder
from modelopt_sparse.checks import read_yaml, read_yaml_file
from modelopt_sparse.distributed import local_device
from modelopt_sparse.model.hf import empty_model, model_class, quantization_of, unloaded
from modelopt_sparse.plan.options import SELF, is_data_set
from modelopt_sparse.reports.evaluate import task_scores
from modelopt_sparse.reports.text import first_few

# errors of the input: one line and an exit code, no traceback
WRONG = (ValueError, TypeError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError)

PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

# options that no YAML file can hold
PYTHON_ONLY = ("data_loader", "collect_func", "forward_loop", "tokenizer", "processor", "masks")


def settings_of(
    source: "NamedModel",
    *,
    config: Path | None = None,
    options: list[str] | None = None,
    check_device: bool = True,
    **flags: Any,
) -> dict[str, Any]:
    """The API's options, and ``method``: from the YAML file ``config``, then ``options`` (--set), then ``flags``.

    A later one wins; flags that are None are not given. With data they have the tokenizer of ``source``.
    ``check_device``: whether the device must be on this machine. Raises ValueError for input that cannot be used.
    """
    settings: dict[str, Any] = {"method": None}
    if config is not None:
        written = read_yaml_file(config, "--config")
        if not isinstance(written, dict):
            raise ValueError(f"--config {str(config)!r} must hold a mapping of options")
        settings |= written
    for option in options or []:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ValueError(f"--set {option!r}: write KEY=VALUE")
        settings[key] = read_yaml(value, f"--set {option!r}")
    for key in settings.keys() & set(PYTHON_ONLY):
        raise ValueError(f"option {key!r} is a Python object; on the command line use --data FILE")
    if flags.get("progress"):
        transformers.utils.logging.enable_progress_bar()
    settings |= {key: value for key, value in flags.items() if value is not None}
    if settings.get("data", SELF) != SELF:
        settings["data"] = data_of(settings["data"], "train")
    if "data" in settings:
        settings["tokenizer"] = source.tokenizer
    if settings.get("device") is not None:
        settings["device"] = local_device(settings["device"])
        if check_device:
            try:
                torch.empty(0, device=settings["device"])
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"--device {settings['device']}: {error}") from None
    return settings


def data_of(name: str | Path, split: str) -> Any:
    """The text that --data or --eval names: a file, or the opened data set of this name or in this folder.

    ``split``: taken where the name of a data set has none. Raises ValueError for anything else.
    """
    if not str(name):
        raise ValueError("the name of the data is empty: give a file, a folder or a data set")
    path = Path(name)
    if path.is_file() or not (path.is_dir() or is_data_set(str(name))):
        data: Any = path
    else:
        data = open_dataset(path if path.is_dir() else str(name), split)
    documents_of(data)
    return data


def tokens_in(name: str, tokenizer: Any, *, special_tokens: bool = False) -> Tensor:
    """The tokens of held-out text."""
    return tokens_of(data_of(name, "test"), tokenizer, special_tokens=special_tokens)


def add_evaluation(report: mts.Report, path: Path) -> None:
    """Put what `eval --json` printed, or lm_eval wrote, into a report. Raises ValueError for any other file."""
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        if "results" not in measured:
            report.evaluation = mts.Evaluation.from_dict(measured)
        elif [*task_scores(measured["results"])]:
            report.tasks = measured["results"]
        else:
            raise ValueError("its results hold no score")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = "neither what `eval --json` printed nor results of lm_eval"
        raise ValueError(f"--evaluation {str(path)!r} is {problem}: {error}") from None


class NamedModel:
    """The model that MODEL names, a folder or a hub name, and how to load it. Raises ValueError if there is none."""

    def __init__(self, name: str, dtype: str, revision: str | None, trust_remote_code: bool) -> None:
        self.name, self.dtype = name, dtype
        self.remote = {"trust_remote_code": trust_remote_code}
        self.hub = {"revision": revision, **self.remote}
        where = "is neither a folder nor a model that the hub gives"
        try:  # transformers itself would try again for half a minute
            is_there = has_file(name, "config.json", revision=revision)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name!r} {where}: {error}") from None
        if not is_there and Path(name).is_dir():
            raise ValueError(f"{name!r} holds no config.json: it is not a folder of a transformers model")
        if not is_there:
            raise ValueError(f"{name!r} {where}: it is not there, not a model, or there is no connection")

    def empty(self, dequantize: bool, *, read: bool = False) -> tuple[nn.Module, Quantized | None]:
        """(the model on the meta device, in the dtype that it will have; how it is dequantized, or None).

        ``read``: its weights are read next, so those of a quantized model may be downloaded from the hub now.
        """
        network = empty_model(self.name, **self.hub)
        download = dequantize and read and quantization_of(network.config) is not None
        where = self._folder() if download else self.name
        quantized = dequantization_of(network, where, self.dtype, dequantize=dequantize)
        if quantized is not None:
            return network.to(quantized.dtype), quantized
        dtype = getattr(network.config, "dtype", None) if self.dtype == "auto" else getattr(torch, self.dtype)
        return network if dtype is None else network.to(dtype), None

    def load(self, device: str = "cpu", quantized: Quantized | None = None, *, masks: bool = False) -> nn.Module:
        """The model with its weights; ``masks``: with the masks and the report of a folder that `save` wrote."""
        if masks and has_file(self.name, DESCRIPTION, revision=self.hub["revision"]):
            return mts.load(self._folder(), dtype=self.dtype, **self.hub).to(device)
        config = AutoConfig.from_pretrained(self.name, **self.hub)
        architecture = model_class(config, self.name)
        if quantized is not None:
            return load_dequantized(architecture, self._folder(), config, quantized, **self.remote).to(device)
        network, info = loaded(architecture, self.name, dtype=self.dtype, **self.hub)
        if missing := unloaded({**info, "unexpected_keys": ()}):
            problem = f"does not hold a whole {type(network).__name__}: {first_few(missing)}"
            raise ValueError(f"{self.name!r} {problem}: get the checkpoint again, or one of this class")
        return network.to(device)

    def _folder(self) -> Path:
        return local_folder(self.name, self.hub["revision"])

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.name, **self.hub)

    def companions(self) -> list[Any]:
        """The model's tokenizer (with its chat template) and processor, where it has them. Warns if they
        are there and cannot be read."""
        companions = []
        for kind, files in ((AutoTokenizer, TOKENIZER), (AutoProcessor, PROCESSOR)):
            try:
                companions.append(kind.from_pretrained(self.name, **self.hub))
            except (OSError, ValueError, KeyError, ImportError) as error:
                here = (has_file(self.name, file, revision=self.hub["revision"]) for file in files)
                if isinstance(error, ImportError) or any(here):
                    part = "tokenizer" if kind is AutoTokenizer else "processor"
                    warnings.warn(f"its {part} is left behind, for it cannot be loaded here: {error}", stacklevel=2)
        return companions
