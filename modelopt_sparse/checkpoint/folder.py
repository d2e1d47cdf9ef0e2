"""Where a folder may be written: not over files, unless the user says so, and never over what a model comes from."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from modelopt_sparse.reports.report import Report

# place ----------------------------------------------------------------------------------------------------------------


SOURCE = "sparsity_source"  # where a model holds the path of the folder that `restore` or `load` has read


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
        raise ValueError(f"{str(path)!r} is a file: a folder is written, give another path")
    if Path.cwd().is_relative_to(place):
        what = "the current directory" if place == Path.cwd() else "a folder above the current directory"
        raise ValueError(f"{str(path)!r} is {what}: a model is written to a folder of its own, give another path")
    for source in sources:
        if place.exists() and Path(source).is_dir() and place.samefile(source):
            raise ValueError(
                f"{str(path)!r} is the folder that the weights come from, which would be lost: give another path"
            )
    if not overwrite and is_occupied(place):
        raise ValueError(f"{str(path)!r} exists and is not empty: give another path, or overwrite=True (--overwrite)")
    return path


def is_occupied(folder: Path) -> bool:
    """Whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def remember_source(model: nn.Module, folder: Path) -> None:
    """Note on a model the folder that its weights were read from."""
    setattr(model, SOURCE, str(folder.resolve()))


def sources_of(model: nn.Module) -> Iterator[str]:
    """Where a model's weights are known to come from: the folders that `restore` and `load` have read, and the paths
    and names on the hub that transformers notes on its models. Relative paths count from the current directory."""
    for module in model.modules():
        names = [module.__dict__.get(SOURCE)]
        if isinstance(module, PreTrainedModel):
            names += [module.name_or_path, getattr(module.config, "name_or_path", None)]
        yield from (name for name in names if name)


# files ----------------------------------------------------------------------------------------------------------------
# Locks on files, folders that are made for a while, errors of a full disk, and hashes of files.


try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two runs apart
    fcntl = None


def hold(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or folder -> an open descriptor, which holds the lock until it is closed.

    The lock ends with the process, however that ends. None is returned on systems without locks. Raises BlockingIOError
    if another process holds the lock, OSError if the path cannot be locked.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def hold_file(path: Path) -> int | None:
    """Make a file, its folder too, and lock it -> an open descriptor; None on systems without locks.

    Who holds such a lock removes the file before letting go of it. If that happens between opening and locking, the
    file is made once more. Raises BlockingIOError if another process holds the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = hold(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the folder has just been removed
            continue
        if descriptor is None or _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def missing_parents(path: Path) -> list[Path]:
    """The folders that are missing above a path, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


# numbers of the errors: no space left; the limit on a file's size is reached; the user's quota is
FULL = {errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else [])}


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that there is no space left.

    The errors of safetensors and torch have the number of the system's error in their text.
    """
    while error is not None:
        text = str(error)
        if any(f"(os error {number})" in text or f"{os.strerror(number)} ({number})" in text for number in FULL):
            return True
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


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


# format ---------------------------------------------------------------------------------------------------------------
# The files in a folder of a sparse model: reading and checking them. The format is specified in docs/format.md.
#
# An ordinary Hugging Face folder (or one model.safetensors) whose weights hold exact zeros, plus ``sparsity.json`` and
# ``sparsity_masks.safetensors``. No pickle.


FORMAT_VERSION = 1
DESCRIPTION = "sparsity.json"
MASKS = "sparsity_masks.safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files
ENTRIES = ("config.json", DESCRIPTION)  # a folder without these is not read as a model
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt")

Read = Callable[[str], Tensor | None]  # name of a tensor -> the tensor, None if there is none


# packing ------------------------------------------------------------------------------------------------------------


def pack_mask(mask: Tensor) -> Tensor:
    """Bool mask of any shape -> uint8 ``[ceil(numel / 8)]``; bit i of byte k is entry 8 k + i in row-major order."""
    bits = mask.flatten().cpu().to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_mask`."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[: torch.Size(shape).numel()].view(shape).bool()


# the description ----------------------------------------------------------------------------------------------------


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

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Description":
        """The description in JSON data.

        Raises KeyError, TypeError, AttributeError or ValueError if the data is not as docs/format.md says.
        """
        return cls(
            model_class=str(data["model_class"]),
            masks={name: (tuple(map(int, mask["shape"])), int(mask["kept"])) for name, mask in data["masks"].items()},
            aliases={name: str(other) for name, other in data["aliases"].items()},
            files={name: (int(file["size"]), str(file["sha256"])) for name, file in data["files"].items()},
            report=None if data["report"] is None else Report.from_dict(data["report"]),
        )


def read_description(folder: str | Path) -> Description:
    """The checked ``sparsity.json`` of a folder. Raises ValueError if there is none that this version can read."""
    folder = checked_path(folder)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder: give one that modelopt_sparse.save wrote")
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} holds no {DESCRIPTION}: it is not a folder that modelopt_sparse.save wrote to its end"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"] if data["format"] == "modelopt_sparse" else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is truncated, edited or of another format: {error!r}") from None
    if not isinstance(version, int):
        raise ValueError(f"{str(path)!r} is not in the format of modelopt_sparse.save")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {version}, this library reads up to {FORMAT_VERSION}: "
            "update modelopt_sparse"
        )
    if data.pop("checksum", None) != checksum(data):
        raise ValueError(
            f"{str(path)!r} has been edited since it was saved (its checksum differs): save the model anew"
        )
    try:
        return Description.parse(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} does not hold what its format asks for: {error!r}") from None


def checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 of the description, without the checksum itself, as JSON with sorted keys and no spaces."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checked_path(folder: str | Path) -> Path:
    """The path of a folder to read or write. Raises ValueError for the name of a pickle file."""
    path = Path(folder)
    if path.suffix in PICKLES and not path.is_dir():
        raise ValueError(
            f"{str(path)!r} looks like a pickle file, which this library neither writes nor reads: give a folder, "
            f"for example {str(path.with_suffix(''))!r}"
        )
    return path


# the files ----------------------------------------------------------------------------------------------------------


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
    shape, _ = description.masks[name]
    try:
        with safe_open(folder / MASKS, framework="pt") as packed:
            return unpack_mask(packed.get_tensor(name), shape)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"mask {name!r} cannot be read from {str(folder / MASKS)!r}: {error}") from None


def weight_files(folder: Path) -> list[str]:
    """Names of the files that ``from_pretrained`` reads weights from."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(folder / INDEX)!r} cannot be read: {error!r}") from None


def weight_reader(folder: Path, files: Iterable[str]) -> tuple[set[str], Read]:
    """(names of the tensors in a folder's weight files, a function that reads one of them by name)."""
    opened = [safe_open(folder / name, framework="pt") for name in files]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
    return set(where), lambda name: where[name].get_tensor(name) if name in where else None


def move_in(finished: Path, folder: Path, names: Iterable[str]) -> None:
    """Move the files ``names`` of a finished folder into one that exists, and remove that one's old weight files.

    The old ``config.json`` and ``sparsity.json`` are deleted first, and the new ones moved last. So a folder that is
    half old and half new is not read as a model. It may be called again after it was interrupted.
    """
    names = [*names]
    for name in reversed(ENTRIES):
        if (finished / name).is_file():
            (folder / name).unlink(missing_ok=True)
    for name in names:
        if name not in ENTRIES and (finished / name).is_file():
            (finished / name).replace(folder / name)
    for path in folder.glob("model*.safetensors*"):  # the old weight files
        if path.name not in names:
            path.unlink()
    for name in ENTRIES:
        if (finished / name).is_file():
            (finished / name).replace(folder / name)


# staging --------------------------------------------------------------------------------------------------------------
# Writing a folder at another place beside its own, and moving it there when it is complete.
#
# So the folder is never seen half written, even if this process is killed, or if others write the same folder.


@contextmanager
def staged(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder to write to, beside ``folder``. At the end it is moved to ``folder``; after an error it is removed.

    Raises OSError if it cannot be written, with a text that says what is at ``folder`` now. Raises ValueError if there
    are files in ``folder`` at the end, unless ``overwrite`` is True.
    """
    folder = folder.resolve()
    made = missing_parents(folder)
    writer = f"{socket.gethostname()}.{os.getpid()}"  # several processes may write the same folder
    staging = folder.with_name(f".{folder.name}.{writer}.partial")
    left = "what was there before is complete" if folder.exists() else "nothing is left of it"
    lock = None
    try:
        _remove_what_was_killed(folder)
        lock = _made_and_held(staging)
        yield staging
        mode = (staging / DESCRIPTION).stat().st_mode
        for path in staging.iterdir():
            path.chmod(mode)  # safetensors' files are for their owner alone, this one is like any new file
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        if not _took_its_place(staging, folder):
            if not overwrite and is_occupied(folder):
                raise ValueError(
                    f"{str(folder)!r} has come into being meanwhile, and is left as it is: give another path, or "
                    "overwrite=True (--overwrite)"
                )
            left = f"it has no {DESCRIPTION} now and may mix old and new files, save again"
            move_in(staging, folder, sorted(path.name for path in staging.iterdir()))
    except Exception as error:
        # tokenizers raise a bare Exception when the disk is full
        if not isinstance(error, (OSError, SafetensorError)) and not is_full(error):
            raise
        advice = "; the disk is full: free space and save again" if is_full(error) else ""
        raise OSError(f"{str(folder)!r} could not be written ({left}): {error}{advice}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        remove_empty(made)  # they are not empty if all went well


def _remove_what_was_killed(folder: Path) -> None:
    """Remove the staging folders for this place whose process was killed: those that no process has locked."""
    name = re.compile(rf"\.{re.escape(folder.name)}\..+\.\d+\.partial")
    stagings: list[Path] = []
    with suppress(OSError):  # the parent may not be there yet, or cannot be listed
        stagings += [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]
    for path in stagings:
        with suppress(OSError):  # another process holds the lock, or it cannot be locked
            lock = hold(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _made_and_held(staging: Path) -> int | None:
    """Make an empty folder and lock it -> the lock; None if there are no locks.

    Between the two steps another process may take the folder for one of a killed process, and lock or remove it. Then
    it is made once more.
    """
    while True:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True, exist_ok=True)
        try:
            lock = hold(staging)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:  # a file system without locks
            return None
        if staging.exists():
            return lock
        if lock is not None:
            os.close(lock)


def _took_its_place(staging: Path, folder: Path) -> bool:
    """Rename the staging folder to ``folder``, unless that exists -> whether it was renamed.

    Another process may make ``folder`` at the same moment.
    """
    if folder.exists():
        return False
    try:
        staging.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return False
    return True
