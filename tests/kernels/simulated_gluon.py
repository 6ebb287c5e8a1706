# SPDX-License-Identifier: Apache-2.0
"""A model of the part of Gluon that the Hopper kernels use, good enough to run it on a CPU.

Gluon has no interpreter. Here every partition of a program is a thread, an mbarrier counts arrivals and bytes and flips
its phase as the hardware's does, a named barrier counts the threads of both sides, shared memory starts as NaN, and an
asynchronous product reads its operands as late as it may: a barrier that is missing, or waited for in the wrong phase,
shows as a wrong result or as a time-out. One partition is slow, another one in each program. Layouts, fences and registers
are not modelled.
"""

from __future__ import annotations

import ast
import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

TIMEOUT = 20.0  # seconds after which a wait counts as a deadlock
SLOW = 1e-3  # seconds by which every wait of the slow partition takes longer


class _Int(int):
    value = property(int)


class _Float(float):
    value = property(float)


def _constexpr(value: object) -> object:
    return {int: _Int, float: _Float, str: str}[type(value)](value)


class Pointer:
    """Elements of a tensor's storage, at an offset or a tensor of offsets."""

    def __init__(self, tensor: Tensor, offset: object = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: object) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def flat(self) -> Tensor:
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((size,), (1,), 0)


def _load(pointer: Pointer, mask: object = True, other: object = 0) -> Tensor:
    offset = torch.as_tensor(pointer.offset) + pointer.tensor.storage_offset()
    mask = torch.as_tensor(mask).expand(offset.shape)
    return torch.where(mask, pointer.flat()[torch.where(mask, offset, 0)], other)


def _store(pointer: Pointer, value: Tensor, mask: object = True) -> None:
    offset, mask, value = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask), value)
    pointer.flat()[offset[mask] + pointer.tensor.storage_offset()] = value[mask]


class Shared:
    """A shared-memory tensor."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: object) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view([int(size) for size in shape]))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype
        self.data.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when all arrivals of it were made and all expected bytes came in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.count = self.arrived = self.bytes = 0

    def _step(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.arrived += arrivals
            self.bytes += expected
            assert self.arrived <= self.count, "more arrivals than the barrier was initialised for"
            if self.arrived == self.count and self.bytes == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def init(self, count: int) -> None:
        self.count = count

    def arrive(self, count: int = 1) -> None:
        self._step(count, 0)

    def expect(self, size: int) -> None:
        self._step(1, size)

    def complete(self, size: int) -> None:
        self._step(0, -size)

    def wait(self, parity: object) -> None:
        time.sleep(_thread.delay)
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != int(parity), TIMEOUT):
                raise TimeoutError(f"waited for a phase of parity {int(parity)} to end; {self.phase} phases have")


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: object) -> Barrier:
        return self.barriers[int(i)]


_BARRIER = object()  # the layout of barriers


def _allocate(dtype: torch.dtype, shape: list[int], layout: object, value: Tensor | None = None) -> object:
    if layout is _BARRIER:
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    data = torch.full([int(size) for size in shape], float("nan") if dtype.is_floating_point else -77, dtype=dtype)
    return Shared(data if value is None else data.copy_(value))


class TensorDescriptor:
    def __init__(self, tensor: Tensor, block: list[int], layout: object) -> None:
        assert tensor.stride(-1) == 1 and tensor.stride(0) * tensor.element_size() % 16 == 0
        self.tensor, self.block, self.layout, self.dtype = tensor, [int(size) for size in block], layout, tensor.dtype

    from_tensor = classmethod(lambda cls, *args: cls(*args))


def _copy_global_to_shared(descriptor: TensorDescriptor, at: list, barrier: Barrier, target: Shared) -> None:
    tile = torch.zeros(descriptor.block, dtype=descriptor.dtype)
    part = descriptor.tensor[tuple(slice(int(start), int(start) + size) for start, size in zip(at, descriptor.block))]
    tile[tuple(map(slice, part.shape))] = part
    target.store(tile)
    barrier.complete(tile.numel() * tile.element_size())


class NamedBarrier:
    """Ends when as many threads as an instruction names have arrived; those that wait arrive as well."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase, self.arrived = 0, set()

    def arrive(self, threads: int, wait: bool) -> None:
        time.sleep(_thread.delay)
        with self.changed:
            assert _thread.index not in self.arrived, "a partition arrived again before the barrier was complete"
            self.arrived.add(_thread.index)
            phase = self.phase
            if 128 * len(self.arrived) == threads:
                self.phase, self.arrived = phase + 1, set()
                self.changed.notify_all()
            elif wait and not self.changed.wait_for(lambda: self.phase > phase, TIMEOUT):
                raise TimeoutError("waited for a named barrier at which no other partition arrived")


def _assembly(text: str, constraints: str, operands: list, **options: object) -> None:
    """The instructions that are written out."""
    if barrier := re.match(r"bar\.(arrive|sync) \$1, (\d+);", text):
        number = operands[0].unique()
        assert constraints == "=r,r" and 5 < number < 16, "of 16, the first ones are the compiler's"
        _program.barriers[int(number)].arrive(int(barrier[2]), barrier[1] == "sync")
    else:
        assert "cp.async.bulk.prefetch.L2" in text and constraints == "=r,l,r"
        _prefetch(*operands)


def _prefetch(address: Pointer, size: Tensor) -> None:
    """What is read has to be there."""
    element, held = address.tensor.element_size(), address.tensor.untyped_storage().nbytes()
    start = (address.offset + address.tensor.storage_offset()) * element
    assert (size > 0).sum() <= 1, "one lane asks"
    assert ((size == 0) | (start >= 0) & (start + size <= held)).all(), "outside of the cache"
    assert (start[size > 0] % 16 == 0).all() and (size % 16 == 0).all()


class _Product:
    """An asynchronous matrix product: computed when its result has to be there."""

    def __init__(self, a: Shared, b: Shared, acc: object) -> None:
        self.operands, self.result = (a, b, acc), None

    def finish(self) -> None:
        a, b, acc = self.operands
        acc = acc.result if isinstance(acc, _Product) else acc
        self.result = acc + a.data.float() @ b.data.float()


_thread = threading.local()  # products in flight, and the delay of a slow partition


def _warpgroup_mma(a: Shared, b: Shared, acc: object, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async
    product = _Product(a, b, acc if use_acc else torch.zeros_like(acc))
    _thread.queue.append(product)
    return product


def _warpgroup_mma_wait(outstanding: int, deps: list) -> object:
    while len(_thread.queue) > outstanding:
        time.sleep(_thread.delay)  # time to replace an operand that was released too early
        _thread.queue.pop(0).finish()
    results = [dep if dep.result is None else dep.result for dep in deps]
    return results[0] if len(results) == 1 else tuple(results)


_program = SimpleNamespace(ids=None, grid=None, barriers=None)
_programs_run = itertools.count()


def _warp_specialize(partitions: list, warps: list, registers: list) -> None:
    failures: list[BaseException] = []
    _program.barriers = [NamedBarrier() for _ in range(16)]
    slow = next(_programs_run) % (len(partitions) + 1)  # each partition in turn, then none

    def run(index: int, function: Callable, args: tuple) -> None:
        _thread.queue, _thread.index = [], index
        _thread.delay = SLOW if index == slow else 0
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - reported by the launching thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i, *part), daemon=True) for i, part in enumerate(partitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class _Kernel:
    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: object) -> object:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*args: object, **kwargs: object) -> None:
            kwargs.pop("maxnreg", None)
            args = [Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            for ids in itertools.product(*(range(size) for size in grid)):
                _program.ids, _program.grid = ids, grid
                self.function(*args, **kwargs)

        return launch


def _pairwise(function: Callable) -> Callable:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


_jit = SimpleNamespace(
    jit=lambda function=None, **options: _Kernel(function) if function else lambda function: _Kernel(function)
)
_language = SimpleNamespace(
    constexpr=_constexpr,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    float32=torch.float32,
    int1=torch.bool,
    int32=torch.int32,
    int64=torch.int64,
    program_id=lambda axis: torch.tensor(_program.ids[axis]),
    num_programs=lambda axis: _program.grid[axis],
    arange=lambda start, end, layout: torch.arange(start, end),
    full=lambda shape, value, dtype, layout: torch.as_tensor(value).to(dtype).expand([int(s) for s in shape]).clone(),
    zeros=lambda shape, dtype, layout: torch.zeros([int(s) for s in shape], dtype=dtype),
    where=lambda condition, a, b: torch.where(condition, a, b),
    load=_load,
    store=_store,
    max=lambda x, axis: x.amax(axis),
    min=lambda x, axis: x.amin(axis),
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
    associative_scan=lambda x, axis, add: x.cumsum(axis, dtype=x.dtype),
    convert_layout=lambda x, layout: x,
    maximum=_pairwise(torch.maximum),
    minimum=_pairwise(torch.minimum),
    exp=torch.exp,
    sqrt=torch.sqrt,
    exp2=torch.exp2,
    log2=torch.log2,
    static_range=range,
    thread_barrier=lambda: None,
    inline_asm_elementwise=_assembly,
    warp_specialize=_warp_specialize,
    allocate_shared_memory=_allocate,
    NVMMASharedLayout=lambda **options: None,
    NVMMADistributedLayout=lambda **options: None,
    BlockedLayout=lambda *options: None,
    SliceLayout=lambda *options: None,
    SwizzledSharedLayout=lambda *options, order: None,
)


def load_simulated(path: Path, package: str) -> ModuleType:
    """The module at ``path`` as a part of ``package``, with this model in the place of Gluon, there and in what it imports."""
    tree = ast.parse(path.read_text())
    kept, imported = [], {}
    for node in tree.body:
        source = path.with_name(f"{getattr(node, 'module', None)}.py")
        if not isinstance(node, ast.ImportFrom):
            kept.append(node)
        elif node.level and source.exists() and "triton.experimental" in source.read_text():
            part = load_simulated(source, package)
            imported |= {name.name: getattr(part, name.name) for name in node.names}
        elif not (node.module or "").startswith("triton.experimental"):
            kept.append(node)
    tree.body = kept
    module = ModuleType(f"{package}.simulated_{path.stem}")
    module.__package__ = package
    vars(module).update(
        gluon=_jit,
        gl=_language,
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: _BARRIER,
            init=lambda barrier, count: barrier.init(count),
            arrive=lambda barrier, count: barrier.arrive(count),
            expect=lambda barrier, size: barrier.expect(size),
            wait=lambda barrier, phase: barrier.wait(phase),
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=_copy_global_to_shared),
        warpgroup_mma=_warpgroup_mma,
        warpgroup_mma_wait=_warpgroup_mma_wait,
        TensorDescriptor=TensorDescriptor,
        **imported,
    )
    exec(compile(tree, str(path), "exec"), vars(module))
    return module
