"""The folder of a sparse model: where it may be, how it appears in one piece, and the files in it.

docs/format.md specifies the files: an ordinary Hugging Face folder (or one model.safetensors) whose weights hold exact
zeros, plus ``sparsity.json`` and ``sparsity_masks.safetensors``. There is no pickle in it. packed.py makes it smaller.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CHAT_TEMPLATE_DIR, GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file, snapshot_download

from modelopt_sparse.reports.report import Report, library_versions
from modelopt_sparse.reports.text import finite

PLAIN_VERSION, FORMAT_VERSION = 1, 2  # of the format: of plain folders, and of packed ones, the newest that is read
DESCRIPTION = "sparsity.json"
MASKS = "sparsity_masks.safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files
PACKED = "packed."  # what the name of a weight file, and of their index, begins with in a packed folder
ENTRIES = ("config.json", DESCRIPTION)  # a folder without these is not read as a model
# what a save may have written
OLD_WEIGHTS = re.compile(r"(packed\.)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|adapter_(config|model)\..+")
ADAPTER = "adapter_config.json"  # beside weights, transformers adds that adapter of PEFT's to them
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt")
SOURCE = "sparsity_source"  # where a model holds the path of the folder that `restore` or `load` has read
# what tokenizers write; some of them read files that others have written
TOKENIZER = {
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", CHAT_TEMPLATE_DIR),
}
# the ends of files that may hold weights
WEIGHT_FORMATS = (
    *("safetensors", "bin", "pt", "pth", "h5", "keras", "tflite", "msgpack", "npz", "gguf", "onnx", "onnx_data"),
    *("ot", "nemo", "mar", "pkl", "pickle", "ckpt"),
)
NOT_COPIED = re.compile(rf"\.({'|'.join(WEIGHT_FORMATS)})$|\.index\.json$|^sparsity\.|^adapter_config\.", re.IGNORECASE)


# where a folder may be ------------------------------------------------------------------------------------------------


def checked_path(folder: str | Path) -> Path:
    """The path of a folder to read or write. Raises ValueError for the name of a pickle file."""
    path = Path(folder)
    if path.suffix.lower() in PICKLES and not path.is_dir():
        raise ValueError(f"{str(path)!r} looks like a pickle file, which is neither written nor read: give a folder")
    return path


def checked_place(folder: str | Path, *, overwrite: bool, sources: Iterable[str | Path]) -> Path:
    """The path of a folder to write to. ``sources``: paths, or names on the hub, that the weights are read from.

    Raises ValueError

    - for the name of a pickle file, and for a file;
    - for the current directory and the folders above it;
    - for a folder of ``sources``, under whatever name;
    - for a folder that is not empty, unless ``overwrite`` is True.
    """
    path = checked_path(folder)
    place = path.resolve()
    if place.exists() and not place.is_dir():
        problem = "is a file"
    elif Path.cwd().is_relative_to(place):
        problem = "is the current directory or a folder above it, and a model is written to a folder of its own"
    elif any(place.exists() and Path(source).is_dir() and place.samefile(source) for source in sources):
        problem = "is the folder that the weights come from, which would be lost"
    elif is_occupied(place) and not overwrite:
        raise ValueError(f"{str(path)!r} exists and is not empty: give another path, or overwrite=True")
    else:
        return path
    raise ValueError(f"{str(path)!r} {problem}: give another path")


def is_occupied(folder: Path) -> bool:
    """Whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def sources_of(model: nn.Module) -> Iterator[str]:
    """Where a model's weights are known to come from: the folders that `restore` and `load` have read, and the paths
    and names on the hub that transformers notes on its models. Relative paths count from the current directory."""
    for module in model.modules():
        names = [module.__dict__.get(SOURCE)]
        if isinstance(module, PreTrainedModel):
            names += [module.name_or_path, getattr(module.config, "name_or_path", None)]
        yield from (name for name in names if name)


# written in one piece -------------------------------------------------------------------------------------------------


@contextmanager
def staged(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder to write to, beside ``folder``. At the end it takes the place of ``folder``; an error removes it.

    So ``folder`` is never seen half written, even if this process is killed, or if other threads or processes write to
    the same place: each has a folder of its own, and one at a time puts it in place.

    Raises OSError if it cannot be written, with a text that says what is at ``folder`` now. Raises ValueError if there
    are files in ``folder`` at the end, unless ``overwrite`` is True.
    """
    folder = folder.resolve()
    made = missing_parents(folder)
    # the beginning of a long name: with all that follows it may have 255 bytes
    writer, started = f".{folder.name[:32]}.{socket.gethostname()}", round(psutil.Process().create_time())
    staging = folder.with_name(f"{writer}.{os.getpid()}.{started}.{secrets.token_hex(4)}.partial")
    left = "what was there before is complete" if folder.exists() else "nothing is left of it"
    try:
        of_here = re.compile(rf"{re.escape(writer)}\.(\d+)\.(\d+)\.\w+\.partial")
        for path in folder.parent.glob("*.partial"):
            if (writing := of_here.fullmatch(path.name)) and not _runs(*map(int, writing.groups())):
                shutil.rmtree(path, ignore_errors=True)  # its process was killed
        staging.mkdir(parents=True)
        yield staging
        make_durable(staging)
        with _one_at_a_time(folder.parent):
            if not renamed_if_absent(staging, folder):
                if is_occupied(folder) and not overwrite:
                    raise ValueError(f"{str(folder)!r} has come into being meanwhile: give another, or overwrite=True")
                left = f"it has no {DESCRIPTION} now and may mix old and new files, save again"
                move_in(staging, folder, [path.name for path in staging.iterdir()])
    except Exception as error:
        # tokenizers raise a bare Exception when the disk is full
        if not isinstance(error, (OSError, SafetensorError)) and not is_full(error):
            raise
        advice = "; the disk is full: free space and save again" if is_full(error) else ""
        raise OSError(f"{str(folder)!r} could not be written ({left}): {error}{advice}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        remove_empty(made)  # they are not empty if all went well


def _runs(number: int, started: int) -> bool:
    """Whether the process of this number that was started at this time still runs: numbers are given out again."""
    try:
        since = psutil.Process(number).create_time()
    except psutil.Error:
        return False
    return abs(since - started) < 10  # the clock may be set meanwhile


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process is in here with the same folder."""
    if sys.platform == "win32":  # it has no such locks
        yield
        return
    import fcntl  # Windows has none

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Write the files of a folder that is complete through to the disk."""
    mode = next(path.stat().st_mode for name in reversed(ENTRIES) if (path := folder / name).is_file())
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors' files are for their owner alone, this one is like any new file
        sync(path)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def renamed_if_absent(finished: Path, folder: Path) -> bool:
    """Rename a finished folder to ``folder``, unless that exists -> whether it was renamed.

    Another process may make ``folder`` at the same moment.
    """
    try:
        if not folder.exists():
            finished.rename(folder)
            return True
    except OSError:
        if not folder.exists():
            raise
    return False


def move_in(finished: Path, folder: Path, names: Collection[str]) -> None:
    """Move the entries ``names`` of a finished folder into one that exists, and remove that one's old weight files, and
    with a new tokenizer what is left of the old one. A ``config.json`` goes if it is that of a model of transformers.

    The old ``config.json`` and ``sparsity.json`` are deleted first, and the new ones moved last. So a folder that is
    half old and half new is not read as a model. It may be called again after it was interrupted.
    """
    to_move = sorted(name for name in names if (finished / name).exists())
    for name in reversed(ENTRIES):
        if name in to_move or (name not in names and _is_of_transformers(folder / name)):
            (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        is_old = OLD_WEIGHTS.fullmatch(path.name) or (path.name in TOKENIZER and not TOKENIZER.isdisjoint(names))
        if path.name in names or not is_old:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # templates of the tokenizer that is replaced
        else:
            path.unlink()
    for name in sorted(to_move, key=lambda name: name in ENTRIES):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
        elif (folder / name).is_dir() or (finished / name).is_dir():
            (folder / name).unlink(missing_ok=True)
        shutil.move(finished / name, folder / name)  # a copy, if the folder is a file system of its own (a volume)
        sync(folder / name)


def _is_of_transformers(config: Path) -> bool:
    """Whether a ``config.json`` names a class of transformers: modules of the user's own may have one of that name."""
    return config.is_file() and '"model_type"' in config.read_text(encoding="utf-8", errors="ignore")


def missing_parents(path: Path) -> list[Path]:
    """The folders that are missing above a path, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


# numbers of the errors: no space left; the limit on a file's size is reached; the user's quota is
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that there is no space left.

    The errors of safetensors and torch have the number of the system's error in their text.
    """
    if error is None:
        return False
    text = str(error)
    told = any(f"(os error {number})" in text or f"{os.strerror(number)} ({number})" in text for number in FULL)
    return told or getattr(error, "errno", None) in FULL or is_full(error.__cause__ or error.__context__)


# the description ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """The contents of ``sparsity.json``.

    model_class: name of the model's class.
    masks: parameter name -> shape of its mask, and how many weights are kept.
    aliases: further name of a tensor -> the name under which the weight files hold it.
    files: name of a file -> its size in bytes, and its SHA-256.
    report: of the run that made the model sparse, if there is one.
    """

    model_class: str
    masks: Mapping[str, tuple[tuple[int, ...], int]]
    aliases: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    report: Report | None


def read_description(folder: str | Path) -> Description:
    """The checked ``sparsity.json`` of a folder. Raises ValueError if there is none that this version can read."""
    folder = checked_path(folder)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder: give one that modelopt_sparse.save wrote")
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} holds no {DESCRIPTION}: modelopt_sparse.save did not write it to its end")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"]
        if data["format"] != "modelopt_sparse" or not isinstance(version, int):
            raise ValueError("modelopt_sparse.save did not write it")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is truncated, edited or of another format: {error!r}") from None
    if version > FORMAT_VERSION:
        raise ValueError(f"{str(path)!r} has format version {version}, above {FORMAT_VERSION}: update modelopt_sparse")
    if data.pop("checksum", None) != checksum(data):
        raise ValueError(f"{str(path)!r} has been edited since it was saved (its checksum differs): save it anew")
    data = _printable(data)
    try:
        return Description(
            model_class=str(data["model_class"]),
            masks={name: (shape_of(mask["shape"]), int(mask["kept"])) for name, mask in data["masks"].items()},
            aliases={name: str(shared_name) for name, shared_name in data["aliases"].items()},
            files={name: (int(file["size"]), str(file["sha256"])) for name, file in data["files"].items()},
            report=None if data["report"] is None else Report.from_dict(data["report"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} does not hold what its format asks for: {error!r}") from None


def shape_of(sizes: Iterable[Any]) -> tuple[int, ...]:
    """A shape that a file states. Raises ValueError for a negative size."""
    shape = tuple(map(int, sizes))
    if any(size < 0 for size in shape):
        raise ValueError(f"a mask has the shape {list(shape)}")
    return shape


def _printable(value: Any) -> Any:
    """A value of JSON whose texts hold no control characters: a terminal would obey them."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    return [*map(_printable, value)] if isinstance(value, list) else value


def description_of(
    model_class: str, masks: Mapping[str, Any], report: Report | None, aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The contents of ``sparsity.json``, but for what `write_description` adds.

    ``masks`` are parameter names with what `write_masks` says of them.
    """
    return {
        "format": "modelopt_sparse",
        "format_version": PLAIN_VERSION,
        "versions": library_versions(),
        "model_class": model_class,
        "masks": masks,
        "aliases": aliases or {},
        "files": {},
        "report": None if report is None else finite(report.as_dict()),
    }


def write_description(folder: Path, contents: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> None:
    """Write ``sparsity.json``, with the version, the files and the checksum, into a folder that is complete except for
    it. ``known`` holds sizes and hashes of files that need not be computed again."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".safetensors", ".index.json")))
    description = {key: value for key, value in contents.items() if key != "checksum"}
    description["format_version"] = FORMAT_VERSION if is_packed(folder) else PLAIN_VERSION
    description["files"] = {path.name: (known or {}).get(path.name) or size_and_hash(path) for path in files}
    text = json.dumps({**description, "checksum": checksum(description)}, indent=2, default=str)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 of the description, without the checksum itself, as JSON with sorted keys and no spaces."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def size_and_hash(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256, as ``sparsity.json`` lists them."""
    return {"size": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def damaged_files(folder: Path, description: Description) -> dict[str, str]:
    """File name -> what is wrong with the file, for all damaged files of a folder."""
    damaged = {name: f"{DESCRIPTION} does not list {name!r}" for name in {MASKS} - description.files.keys()}
    for name, (size, sha256) in description.files.items():
        path = folder / name
        if Path(name).name != name:
            damaged[name] = f"file name {name!r} leads out of the folder"
        elif not path.is_file():
            damaged[name] = f"file {name!r} is missing"
        elif path.stat().st_size != size:
            damaged[name] = f"file {name!r} has {path.stat().st_size} bytes, not {size}"
        elif file_hash(path) != sha256:
            damaged[name] = f"file {name!r} has changed since it was saved (its hash differs)"
    if not damaged:
        for name in set(weight_files(folder)) - description.files.keys():
            damaged[name] = f"weight file {name!r} does not belong to the folder: {DESCRIPTION} does not list it"
    return damaged


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError that names it if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error!r}") from None


# masks ----------------------------------------------------------------------------------------------------------------


def pack_mask(mask: Tensor) -> Tensor:
    """Bool mask of any shape -> uint8 ``[ceil(numel / 8)]``; bit i of byte k is entry 8 k + i in row-major order."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy(), bitorder="little"))


def unpack_mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_mask`."""
    bits = np.unpackbits(packed.numpy(), count=torch.Size(shape).numel(), bitorder="little")
    return torch.from_numpy(bits).view(shape).bool()


def write_masks(masks: Mapping[str, Tensor], file: Path) -> dict[str, dict[str, Any]]:
    """Write masks to a file -> what ``sparsity.json`` says of them: shape, and how many weights are kept."""
    save_file({name: pack_mask(mask) for name, mask in masks.items()}, file)
    return {name: {"shape": list(mask.shape), "kept": int(mask.count_nonzero())} for name, mask in masks.items()}


def read_masks(folder: Path, description: Description, problems: list[str]) -> dict[str, Tensor]:
    """Parameter name -> mask, for the masks of a folder that agree with its description.

    What is wrong with the others is appended to ``problems``.
    """
    masks: dict[str, Tensor] = {}
    try:
        packed = load_file(folder / MASKS)
    except (SafetensorError, OSError) as error:
        problems.append(f"file {MASKS!r} cannot be read: {error}")
        return masks
    for name in sorted(packed.keys() ^ description.masks.keys()):
        holder, lacker = (MASKS, DESCRIPTION) if name in packed else (DESCRIPTION, MASKS)
        problems.append(f"mask {name!r} is in {holder} and not in {lacker}")
    for name, (shape, count) in description.masks.items():
        if name not in packed:
            continue
        if packed[name].dtype != torch.uint8 or packed[name].shape != (-(-torch.Size(shape).numel() // 8),):
            problems.append(f"mask {name!r} does not hold the bits of shape {list(shape)}")
            continue
        masks[name] = unpack_mask(packed[name], shape)
        if int(masks[name].sum()) != count:
            problems.append(f"mask {name!r} keeps {int(masks[name].sum())} weights, not {count}")
    return masks


def read_mask(folder: Path, description: Description, name: str) -> Tensor:
    """One mask of a folder. Raises ValueError if it cannot be read."""
    try:
        with safe_open(folder / MASKS, framework="pt") as packed:
            return unpack_mask(packed.get_tensor(name), description.masks[name][0])
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"mask {name!r} cannot be read from {str(folder / MASKS)!r}: {error}") from None


# weights --------------------------------------------------------------------------------------------------------------


def hub_folder(name: str, revision: str | None) -> Path:
    """The folder in the hub's cache of a checkpoint, which is downloaded without weights of other formats.

    Raises ValueError if the hub does not give it.
    """
    try:
        folder = Path(snapshot_download(name, revision=revision, ignore_patterns=[f"*.{x}" for x in WEIGHT_FORMATS]))
        described = (folder / DESCRIPTION).is_file()
        for file in read_description(folder).files if described else weight_files(folder):
            cached_file(name, file, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is neither a folder nor a model that the hub gives: {error}") from None
    return folder


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a folder whose weights are not all that ``from_pretrained`` makes its model of."""
    if (folder / ADAPTER).is_file():
        problem = f"holds {ADAPTER}, an adapter that transformers adds to the weights"
        raise ValueError(f"{str(folder)!r} {problem}: move it to another folder, or merge it first")


def generation_of(folder: Path) -> GenerationConfig | None:
    """The generation config of a folder, if it has one. Raises OSError if it is broken: models would go without it."""
    return GenerationConfig.from_pretrained(folder) if (folder / GENERATION_CONFIG_NAME).is_file() else None


def is_packed(folder: Path) -> bool:
    """Whether the weights of a folder are packed."""
    plain, packed = ([(folder / f"{prefix}{name}").is_file() for name in (WEIGHTS, INDEX)] for prefix in ("", PACKED))
    return any(packed) and not any(plain)


def weight_files(folder: Path) -> list[str]:
    """Names of the files that ``from_pretrained`` reads weights from, or of their packed forms."""
    prefix = PACKED if is_packed(folder) else ""
    index = folder / f"{prefix}{INDEX}"
    if (folder / f"{prefix}{WEIGHTS}").is_file() or not index.is_file():
        return [f"{prefix}{WEIGHTS}"]
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} cannot be read: {error!r}") from None
    if outside:
        raise ValueError(f"{str(index)!r} names {outside[0]!r}, which leads out of the folder: do not use it")
    return [f"{prefix}{name}" for name in names]


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy what lies beside a source's weights -> what was copied and what was left, as notes. Left are files that
    ``folder`` has, other weights, hidden files, and links that leave the source.

    The folder is published as it is, and ``.env`` or a linked key are nobody's business.
    """
    place = source.resolve()
    homes = [place, *([place.parents[1] / "blobs"] if place.parent.name == "snapshots" else [])]  # of the hub's cache
    templates = source / CHAT_TEMPLATE_DIR  # of a tokenizer with several
    ours = {*weight_files(source), INDEX, f"{PACKED}{INDEX}", MASKS, DESCRIPTION}
    copied, left = [], []
    for path in sorted(child for parent in (source, templates) if parent.is_dir() for child in parent.iterdir()):
        name = str(path.relative_to(source))
        if (folder / name).exists() or path == templates:
            continue
        if path.name.startswith("."):
            left.append(f"{name} (hidden)")
        elif not path.exists() or not any(path.resolve().is_relative_to(home) for home in homes):
            left.append(f"{name} (a link to nothing, or out of the folder)")
        elif path.is_dir():
            left.append(f"{name} (a folder)")
        elif NOT_COPIED.search(path.name):
            kind = "other weights" if path.suffix in (".safetensors", ".json") else "weights of another format"
            left += [] if path.name in ours else [f"{name} ({kind})"]
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
            copied.append(name)
    handled = {"copied from the source": copied, "left behind": left}
    return [f"{verb}: {', '.join(names)}" for verb, names in handled.items() if names]
