"""ROCm's two C libraries and CUDA's, in Python: a child with this folder on its path meets them instead of a driver.

The real ``amdsmi`` runs on top, ctypes structures and all; so what is tested is what it asks and gives. FAKE_DRIVER
says how the machine is.
"""

import ctypes
import os

MODE = os.environ.get("FAKE_DRIVER", "")
PENDING, UNRESERVABLE, NOT_SUPPORTED, DRIVER_NOT_LOADED, NO_PERMISSION = 1, 2, 2, 31, 10
MIB = 2**20


def _socket_handles(count, handles):
    count._obj.value = 0 if MODE == "no card" else 1
    if handles:
        handles[0] = 1000
    return 0


def _processor_handles(_socket, count, handles):
    count._obj.value = 2
    if handles:
        handles[0], handles[1] = 2000, 2001
    return 0


def _bdf(handle, bdf):
    bdf._obj.struct_amdsmi_bdf_t.bus_number = 5 + handle.value - 2000
    return 0


def _asic(_handle, info):
    info._obj.market_name = b"AMD Instinct MI300X"
    return NOT_SUPPORTED if MODE == "nameless" else 0


def _total(_handle, _kind, total):
    total._obj.value = 196_592 * MIB
    return 0


def _usage(handle, kind, used):
    assert kind == 0  # VRAM
    used._obj.value = (283 if handle.value == 2000 else 90_000) * MIB
    return 0


def _process_list(handle, count, found):
    if MODE == "no permission":
        return NO_PERMISSION
    pids = [os.getpid()] if handle.value == 2000 else [os.getpid(), 4242]
    count._obj.value = len(pids)
    for one, pid in zip(found, pids, strict=False):
        one.pid = pid
        one.memory_usage.vram_mem = 89_000 * MIB if pid == 4242 else 0
    return 0


def _bad_pages(_handle, count, pages):
    status = [PENDING, UNRESERVABLE, UNRESERVABLE, 0] if MODE == "sick" else []
    count._obj.value = len(status)
    if pages:
        for page, said in zip(pages, status, strict=True):
            page.status = said
    return 0


def _init(_flags):
    return DRIVER_NOT_LOADED if MODE == "no driver" else 0


class Function:
    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


def _unexpected(name):
    def call(*_arguments):
        raise AssertionError(f"nobody expected {name}")

    return call


class Library:
    def __init__(self, **functions):
        self.functions = functions

    def __getattr__(self, name):
        function = Function(self.functions.get(name, _unexpected(name)))
        setattr(self, name, function)
        return function


SMI = Library(
    amdsmi_init=_init,
    amdsmi_get_socket_handles=_socket_handles,
    amdsmi_get_processor_handles=_processor_handles,
    amdsmi_get_gpu_device_bdf=_bdf,
    amdsmi_get_gpu_asic_info=_asic,
    amdsmi_get_gpu_memory_total=_total,
    amdsmi_get_gpu_memory_usage=_usage,
    amdsmi_get_gpu_process_list=_process_list,
    amdsmi_get_gpu_bad_page_info=_bad_pages,
)


def _by_address(device, address):
    device._obj.value = 7
    return 0 if address == b"0000:05:00.0" else 101


HIP = Library(
    hipInit=lambda _flags: 0,
    hipDeviceGetByPCIBusId=_by_address,
    hipSetDevice=lambda device: 0 if device.value == 7 else 1,
    hipMalloc=lambda _memory, _size: 2 if MODE == "full" else 0,
    hipMemset=lambda _memory, _value, _size: 0,
    hipDeviceSynchronize=lambda: 0,
    hipFree=lambda _memory: 0,
    hipGetErrorString=lambda code: {2: b"out of memory", 101: b"invalid device ordinal"}[code],
)


def _entered(_flags):
    with open(os.environ["FAKE_CUDA_ENTERED"], "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\n")
    return 0


def _error_text(code, text):
    text._obj.value = b"out of memory"
    return 0


CUDA = Library(
    cuInit=_entered,
    cuDeviceGet=lambda _device, _index: 0,
    cuCtxCreate_v2=lambda _context, _flags, _device: 0,
    cuMemAlloc_v2=lambda _memory, _size: 2 if MODE == "full" else 0,
    cuMemsetD8_v2=lambda _memory, _value, _size: 0,
    cuCtxSynchronize=lambda: 0,
    cuMemFree_v2=lambda _memory: 0,
    cuCtxDestroy_v2=lambda _context: 0,
    cuGetErrorString=_error_text,
)

_real = ctypes.CDLL


def _load(name, *more, **others):
    if name is not None and MODE != "no library":
        for part, library in (("libamd_smi", SMI), ("libamdhip64", HIP), ("libcuda.", CUDA)):
            if part in str(name):
                return library
    return _real(name, *more, **others)


ctypes.CDLL = _load
