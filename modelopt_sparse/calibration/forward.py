"""Running a model, whole or block by block, over the calibration data."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from safetensors import SafetensorError
from torch import nn

from modelopt_sparse.calibration.data import Call, load_calls, take_in
from modelopt_sparse.calibration.hooks import LayerInputs, SharingChanged
from modelopt_sparse.calibration.padding import PaddingError, Side, TokenMasks, sides_of, token_masks
from modelopt_sparse.calibration.storage import Unreadable
from modelopt_sparse.distributed import Team
from modelopt_sparse.model.devices import free_bytes, input_device, is_out_of_memory, onloaded
from modelopt_sparse.model.nested import map_tensors
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan


class Runner:
    """A model with the blocks of its plan, and the data to run it on: this process's share of it, where several work
    together. ``calls`` is None for a forward_loop; ``sha256`` is that of all the data, if it is known beforehand."""

    def __init__(self, model: nn.Module, plan: Plan, config: SparsifyConfig, team: Team | None = None) -> None:
        self.model, self.config = model, config
        self.team = team or Team()
        self.sha256: str | None = None
        self.calls = None if config.forward_loop is not None else load_calls(config, model)
        if self.calls is not None and config.split_data and self.team.size > 1:
            self.calls = self._share(self.calls)
        self.blocks = [block for stack in plan.stacks for block in stack.blocks]
        on_device = plan.streamed.get(str(config.device), {})
        self._beside = sum(nbytes for what, nbytes in on_device.items() if what != "activations")
        self._sides = sides_of(model)

    def _share(self, calls: list[Call]) -> list[Call]:
        """Every so manieth batch of data that is the same in all processes."""
        digest = hashlib.sha256()
        for call in calls:
            take_in(digest, call.args, call.kwargs)
        self.sha256 = digest.hexdigest()
        self.team.same(
            {"the number of calibration batches": len(calls), "the SHA-256 of the calibration data": self.sha256},
            "give all of them the same batches in the same order (a shuffling DataLoader needs a generator with one "
            "seed), of which each takes its share; or split_data=False, if what each of them gives is its share",
        )
        if len(calls) < self.team.size:
            raise ValueError(
                f"{self.team.size} processes share out the calibration batches, and there are only {len(calls)}: give "
                "smaller batches, more data, or start fewer processes"
            )
        return calls[self.team.rank :: self.team.size]

    def run_model(
        self,
        begin: Callable[[TokenMasks], None],
        inputs: LayerInputs | None = None,
        stop_after: nn.Module | None = None,
        digest: "hashlib._Hash | None" = None,
    ) -> None:
        """Run the whole model over all of the data; ``begin`` is told of each call and its padding, and every input
        tensor goes into ``digest``."""

        def on_call(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if digest is not None:
                take_in(digest, args, kwargs)
            begin(token_masks(module, args, kwargs, count_padding=self.config.count_padding))

        with ExitStack() as hooks:
            hooks.enter_context(self.running())
            hooks.enter_context(self.model.register_forward_pre_hook(on_call, with_kwargs=True, prepend=True))
            for block in self.blocks:
                if self.config.device is not None and block is not self.model:
                    hooks.enter_context(onloaded(block, self.config.device, resident=False))
            if inputs is not None:
                hooks.enter_context(inputs)
            if self.config.forward_loop is not None:
                self.config.forward_loop(self.model)
                return
            if stop_after is not None and self.may_stop:
                hooks.enter_context(stop_after.register_forward_hook(lambda *_: self.stop()))
            assert self.calls is not None
            for index, call in enumerate(self.calls):
                self._call_model(call, index * self.team.size + self.team.rank)

    @property
    def may_stop(self) -> bool:
        """Whether a call of the model can be ended early: not inside of a user's loop, nor under hooks of accelerate,
        which clean up after their module's forward."""
        return self.calls is not None and not any(hasattr(module, "_hf_hook") for module in self.model.modules())

    def stop(self) -> None:
        """End the current call of the model, from a hook."""
        raise _Stopped

    def _call_model(self, call: Call, index: int) -> None:
        device = input_device(self.model)
        try:
            self.model(
                *map_tensors(lambda x: x.to(device), call.args), **map_tensors(lambda x: x.to(device), call.kwargs)
            )
        except _Stopped:
            pass
        except (PaddingError, SharingChanged, Unreadable, OSError, SafetensorError):  # the batch is not to blame
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            given = map_tensors(lambda x: f"{x.dtype} {list(x.shape)}", {**dict(enumerate(call.args)), **call.kwargs})
            raise ValueError(
                f"{type(self.model).__name__} cannot take calibration batch {index}, {given}: {type(error).__name__}: "
                f"{error}. Give batches that model(**batch) or model(batch) takes, or a collect_func that makes them"
            ) from error

    def side_of(self, module: nn.Module) -> Side:
        return self._sides.get(module, "decoder")

    def has_room(self, nbytes: int) -> bool:
        """Whether activations of so many bytes can be held on the execution device: where they take no more than half
        of what is free there, and leave what the plan says that a block, its statistics and a solver take."""
        if self.config.device is None:
            return False
        free = free_bytes(self.config.device)
        return nbytes <= min(free // 2, free - self._beside)

    @contextmanager
    def resident(self, blocks: Sequence[nn.Module], *, stays: bool = False) -> Iterator[None]:
        """Blocks can be run by themselves, on the execution device if one was asked for. A single block is there until
        the context ends; several move for each call. ``stays``: so does what they give; otherwise it goes back to where
        they came from."""
        device = self.config.device
        with ExitStack() as hooks:
            for block in blocks if device is not None else ():
                assert device is not None
                hooks.enter_context(onloaded(block, device, resident=len(blocks) == 1, stays=stays))
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """What forwards are run under: the precision that was asked for, and every module called. No solver is."""
        with _every_module_called(), self._autocast():
            yield

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """The precision that the user asked for, on every device that the model or a part of it runs on."""
        with ExitStack() as contexts:
            if self.config.autocast is not None:
                types = {p.device.type for p in self.model.parameters() if not p.is_meta} | {"cpu"}
                types |= {self.config.device.type} if self.config.device is not None else set()
                dtype = getattr(torch, self.config.autocast)
                for device_type in sorted(types):
                    # reconstruction changes weights while this is entered: no copy of them may be kept
                    contexts.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
            yield


@contextmanager
def _every_module_called() -> Iterator[None]:
    """nn.TransformerEncoder and nn.MultiheadAttention have a fused path that reads the weights of modules inside them
    without calling these, and packs padded batches into nested tensors: switch it off."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Stopped(Exception):
    """The part of the model that was to run has run."""
