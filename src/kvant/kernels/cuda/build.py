"""Compiles CUDA C++ at first use with NVRTC, which torch's CUDA wheels install.

No CUDA toolkit is needed: torch for CUDA depends on `cuda-bindings` and on NVRTC. If either is missing,
`unavailable` returns the reason, and callers use another kernel.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PROBE = b'extern "C" __global__ void probe() {}'
_HOPPER = "sm_90a"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel, its dynamic shared memory in bytes, and the C types of its arguments.

    module: keeps the code loaded.
    """

    module: Any
    function: Any
    shared_bytes: int
    arguments: tuple[type, ...]

    def launch(
        self,
        programs: int | tuple[int, int],
        threads: int,
        values: Sequence[object],
        *,
        ahead: bool = False,
    ) -> None:
        """Launches on torch's current stream. values: one per argument; addresses as int.

        programs: across, or across and down. ahead: it may start while the previous kernel runs; it must then
        wait for that kernel itself.
        """
        driver = import_module("cuda.bindings.driver")
        stream = torch.cuda.current_stream().cuda_stream
        across, down = programs if isinstance(programs, tuple) else (programs, 1)
        given = (tuple(values), self.arguments)
        if not ahead:
            launched = driver.cuLaunchKernel(
                self.function, across, down, 1, threads, 1, 1, self.shared_bytes, stream, given, 0
            )
            _checked(launched)
            return
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = across, down, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        overlap = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        overlap.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [overlap], 1
        _checked(driver.cuLaunchKernelEx(config, self.function, given, 0))


def is_hopper() -> bool:
    """Whether the device is an NVIDIA GPU of compute capability 9.0."""
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability() == (9, 0)


@functools.cache
def unavailable() -> str | None:
    """Returns why CUDA C++ cannot be compiled for this device, or None; checked once per process."""
    if not is_hopper():
        return "the CUDA C++ kernel is written for sm_90 alone"
    try:
        _compiled(_PROBE, {})
    except (ImportError, RuntimeError) as error:
        return f"NVRTC does not work here: {error}"
    return None


@functools.cache
def available(otherwise: str) -> bool:
    """Whether CUDA C++ can be compiled. If not, logs once why. otherwise: what runs instead, for the log."""
    reason = unavailable()
    if reason is not None:
        level = logging.WARNING if is_hopper() else logging.INFO
        logger.log(level, "%s: %s", otherwise, reason)
    return reason is None


def build(
    package: str,
    sources: Sequence[str],
    name: str,
    defines: Mapping[str, int | str],
    shared_bytes: int,
    arguments: tuple[type, ...],
) -> Kernel:
    """Concatenates and compiles `sources` of `package` with macros `defines`; loads kernel `name`.

    Raises RuntimeError with NVRTC's log if the text does not compile.
    """
    begun = _begun.get(_key(package, sources, defines))
    code = _compile(package, sources, defines) if begun is None else begun.result()
    driver = import_module("cuda.bindings.driver")
    torch.cuda.current_stream()  # the device's context must exist
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return Kernel(module, function, shared_bytes, arguments)


_begun: dict[object, Future[bytes]] = {}
_threads = ThreadPoolExecutor(max(2, min(16, os.cpu_count() or 2)), thread_name_prefix="nvrtc")


def begin(package: str, sources: Sequence[str], defines: Mapping[str, int | str]) -> None:
    """Starts compiling for a later call of `build`, in another thread."""
    key = _key(package, sources, defines)
    if key not in _begun:
        _begun[key] = _threads.submit(_compile, package, tuple(sources), dict(defines))


def _key(package: str, sources: Sequence[str], defines: Mapping[str, int | str]) -> object:
    return package, tuple(sources), frozenset(defines.items())


def _compile(package: str, sources: Sequence[str], defines: Mapping[str, int | str]) -> bytes:
    text = b"".join(files(package).joinpath(source).read_bytes() for source in sources)
    return _compiled(text, defines)


def _compiled(source: bytes, defines: Mapping[str, int | str]) -> bytes:
    """Returns machine code of a CUDA C++ text."""
    nvrtc = import_module("cuda.bindings.nvrtc")
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"kvant.cu", 0, [], []))
    options = [f"--gpu-architecture={_HOPPER}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    encoded = [option.encode() for option in options]
    done = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(done[0]):
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode(errors="replace"))
    code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))  # the binding writes into it
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def _checked(answer: tuple[Any, ...]) -> Any:
    """Returns the result in a binding's answer after its status.

    Raises RuntimeError if the status is an error.
    """
    if int(answer[0]):
        raise RuntimeError(repr(answer[0]))
    return answer[1] if len(answer) > 1 else None


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
