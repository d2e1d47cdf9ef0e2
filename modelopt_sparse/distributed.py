"""The processes of one run: the only file that imports torch.distributed.

`Processes` make one model sparse together. Each exchange begins with headers: every process sends what it is about to
do. One that fails sends why, in the place of its next header, and closes its connections; so no process waits forever,
and each can say which one failed, also where no torchrun stops it.
"""

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

dist: Any = torch.distributed  # of which a build of torch without distributed support has little: one process
if dist.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
else:
    FSDPModule = DTensor = ()  # isinstance(x, ()) is False

TIMEOUT = timedelta(hours=1)  # how long a process waits for the others, which may be solving a large layer
STOPPED = "stopped: "  # how the header of a process that fails begins


def is_sharded(weight: Tensor) -> bool:
    """Whether this process holds only a part of the weight (fully_shard, tensor parallelism)."""
    return isinstance(weight, DTensor)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) manages parameters of a module."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def mask_like(mask: Tensor, weight: Tensor) -> Tensor:
    """A full mask, placed like a sharded ``weight``. Every rank has the same full mask, so nothing is sent."""
    mask = full(mask)  # tensor parallelism replicates buffers, over a part of the weight's mesh
    if not isinstance(weight, DTensor):
        return mask
    from torch.distributed.tensor import distribute_tensor

    mask = mask.to(weight.device_mesh.device_type)
    # a weight that is offloaded between steps lies on another device than its mesh
    return distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None).to(weight.device)


def full(tensor: Tensor) -> Tensor:
    """A tensor in one piece: gathered from all processes if it is sharded, else itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_difference(values: Mapping[str, Any]) -> tuple[str, int] | None:
    """(name, rank) of the first value that differs between the processes of the default group that have the name.

    None if all agree, or if there is one process. All processes call this.
    """
    if not in_group() or dist.get_world_size() == 1:
        return None
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, dict(values))
    for number, rank_values in enumerate(by_rank):
        for name, value in rank_values.items():
            if values.get(name, value) != value:
                return name, number
    return None


def count_processes(asked: bool | None) -> int:
    """The number of processes that work together where the option ``distributed`` is ``asked``.

    None: those of the default group, or this one where there is none; True: those of the group; False: this one alone.
    Raises ValueError for True without a group.
    """
    if not isinstance(asked, bool | None):
        raise ValueError(f"distributed={reprlib.repr(asked)[:300]}: must be True, False or None")
    ready = in_group()
    if asked and not ready:
        raise ValueError(
            "distributed=True needs a process group: start with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    return dist.get_world_size() if ready and asked is not False else 1


class RankError(RuntimeError):
    """Another process of the run stopped or died, or the processes do not do the same."""


class Processes(AbstractContextManager["Processes"]):
    """The processes of one run; this one is number ``rank`` of ``size``. A single process sends nothing.

    All processes call the same methods in the same order, within a ``with``. An error in it, Ctrl-C included, ends the
    run in the others too. `of` makes one.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self._group = group  # of the run: what fails here leaves the user's alone; None when it is over

    @classmethod
    def of(cls, asked: bool | None) -> "Processes":
        """The processes of one run; ``asked`` as for `count_processes`. Raises RankError if one does not come here."""
        size = count_processes(asked)
        if size == 1:
            return cls()
        try:  # this waits for all processes
            return cls(dist.get_rank(), size, dist.new_group(backend="gloo", timeout=TIMEOUT))
        except RuntimeError as error:
            text = str(error)
        raise RankError(
            f"not all of the {size} processes of the group came to this call: "
            f"make it in all of them, or with distributed=False ({text})"
        )

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        # on Ctrl-C the others notice that the connection is gone
        if self._group is not None and isinstance(error, Exception):
            with suppress(RankError):  # the others are gone too: show this error
                self._gather(f"{STOPPED}{type(error).__name__}: {error}", None)
        self._close()

    def all_gather(self, exchange: str, value: Any = None) -> list[Any]:
        """Wait for all processes -> the ``value`` of each, by rank.

        Raises RankError if one failed, died, or is about to do another ``exchange``.
        """
        if self.size == 1:
            return [value]
        headers = self._gather(exchange, value)
        if any(name != exchange for name, _ in headers):
            self._close()
            stopped = [f"rank {rank} {name}" for rank, (name, _) in enumerate(headers) if name.startswith(STOPPED)]
            doing = "; ".join(f"rank {rank}: {name}" for rank, (name, _) in enumerate(headers))
            mismatch = f"the processes of this run do not do the same ({doing}): make the same call in all of them"
            raise RankError("; ".join(stopped) or mismatch)
        return [value for _, value in headers]

    def gather_numbered(self, exchange: str, local: Mapping[int, Any]) -> dict[int, Any]:
        """Merge the values of all processes, each of which has a number of its own."""
        return {number: value for values in self.all_gather(exchange, local) for number, value in values.items()}

    def dealt_out(self, exchange: str, work: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
        """Run ``work`` on the jobs, dealt out to the processes in turns -> all results, which are sent as pickles."""
        local = {number: work(job) for number, job in enumerate(jobs) if number % self.size == self.rank}
        return [value for _, value in sorted(self.gather_numbered(exchange, local).items())]

    def check_same(self, facts: Mapping[str, Any], advice: str) -> None:
        """Raise ValueError, with the first difference and ``advice``, unless every process has the same ``facts``."""
        by_rank = self.all_gather("a comparison of what all processes must share", dict(facts))
        for name in dict.fromkeys(name for facts in by_rank for name in facts):
            values = [facts.get(name, "nothing") for facts in by_rank]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"{name} is not the same in all processes: rank 0 has {values[0]}, "
                        f"rank {rank} has {value}; {advice}"
                    )

    def sum_by_key(self, exchange: str, local: Mapping[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
        """Sum the tensors of each key over all processes; a process may lack some. Those of one key have the same
        shape, or one has fewer axes. ``device``: of what a process gets that has no tensor."""
        if self.size == 1:
            return dict(local)
        shapes: dict[Any, Tensor] = {}  # on "meta"
        for rank_shapes in self.all_gather(exchange, {key: x.to("meta") for key, x in local.items()}):
            for key, like in rank_shapes.items():
                shapes[key] = shapes[key] + like if key in shapes else like
        none = torch.zeros((), device=next((x.device for x in local.values()), device))
        sums = {
            key: local.get(key, none).to(like.dtype).expand(like.shape).contiguous() for key, like in shapes.items()
        }
        self.all_reduce(exchange, list(sums.values()))
        return sums

    def all_reduce(self, exchange: str, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in all processes, by its sum over them."""
        device_types = self.all_gather(exchange, [tensor.device.type for tensor in tensors])
        if self.size > 1:
            self._send(exchange, tensors, device_types, [dist.all_reduce] * len(tensors))

    def broadcast(
        self,
        exchange: str,
        tensors: Sequence[Tensor],
        senders: Sequence[int],
        value: Any = None,
        receivers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Replace each tensor by that of the rank in ``senders`` -> the ``value`` of each rank. ``receivers``: the only
        rank that gets it; the others give a tensor without elements.

        Shapes and dtypes are the same in all processes that have a part in it.
        """
        headers = self.all_gather(exchange, ([tensor.device.type for tensor in tensors], value))
        if self.size > 1:
            sends = [partial(dist.broadcast, src=sender) for sender in senders]
            if receivers is not None:
                sends = [partial(self._send_to, sender, receiver) for sender, receiver in zip(senders, receivers)]
            self._send(exchange, tensors, [device_types for device_types, _ in headers], sends, as_bytes=True)
        return [value for _, value in headers]

    def _send_to(self, sender: int, receiver: int, tensor: Tensor, group: Any) -> None:
        if sender != receiver and self.rank == sender:
            dist.send(tensor, receiver, group=group)
        elif sender != receiver and self.rank == receiver:
            dist.recv(tensor, sender, group=group)

    def barrier(self) -> None:
        """Wait until all are at the end of the run, so that none reports success while another fails."""
        self.all_gather("the end of the run")
        self._close()

    def _close(self) -> None:
        """Close the connections. A process that still waits on them gets an error."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather(self, exchange: str, value: Any) -> list[tuple[str, Any]]:
        assert self._group is not None
        headers: list[Any] = [None] * self.size
        with self._sending(exchange):
            dist.all_gather_object(headers, (exchange, value), group=self._group)
        return headers

    @contextmanager
    def _sending(self, exchange: str) -> Iterator[None]:
        """An error in here ends the run: the connection is useless after it."""
        try:
            yield
            return
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
                self._close()
                raise
            text = " ".join(str(error).split())[:200]
        self._close()  # out here, where no traceback holds the group
        raise RankError(
            f"another process of this run died, left or did not come in time, as rank {self.rank} noticed at "
            f"{exchange!r}; look at what the others printed, and start all again ({text})"
        )

    def _send(
        self,
        exchange: str,
        tensors: Sequence[Tensor],
        device_types: list[list[str]],
        sends: Sequence[Callable[..., Any]],
        *,
        as_bytes: bool = False,
    ) -> None:
        """``sends``: what sends each tensor. Through the default group if it serves the device that all ranks have a
        tensor on, else through the CPU. ``as_bytes``: backends differ in the dtypes that they take."""
        with self._sending(exchange):
            for tensor, send, *types in zip(tensors, sends, *device_types):
                if not tensor.numel():
                    continue
                direct = len(set(types)) == 1 and _serves(tensor.device)
                values = tensor.detach().to(tensor.device if direct else "cpu").contiguous()
                send(values.view(-1).view(torch.uint8) if as_bytes else values, group=None if direct else self._group)
                if values.data_ptr() != tensor.data_ptr():
                    tensor.copy_(values)


@contextmanager
def while_others_wait(asked: bool | None) -> Iterator[bool]:
    """Context for work that one process does for all: it yields True there and False in the others, which wait at the
    end.

    ``asked`` as for `count_processes`. An error becomes a RankError in the others.
    """
    with Processes.of(asked) as processes:
        yield processes.rank == 0
        processes.barrier()


# programs that torchrun starts ----------------------------------------------------------------------------------------


@contextmanager
def launched_group() -> Iterator[None]:
    """The default group of the processes that torchrun started, for a program. For a single process, nothing."""
    if not dist.is_available() or int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or in_group():
        yield
        return
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    store, *numbers = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # torchrun has one store for all attempts, which still says where the processes of the last one were to be
        # reached. Machines count their attempts each for itself.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=numbers[0], world_size=numbers[1])
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_group() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process in the default group; 0 without one."""
    return dist.get_rank() if in_group() else 0


def local_device(device: str) -> str:
    """The device of this process where all are given ``device``: each has a GPU of its own for "cuda"."""
    if device != "cuda" or count_processes(None) == 1:
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _serves(device: torch.device) -> bool:
    """Whether the default group has a backend for this device that does not copy to the CPU."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config()).split(","))
    return device.type != "cpu" and any(kind == device.type and backend != "gloo" for kind, _, backend in pairs)
