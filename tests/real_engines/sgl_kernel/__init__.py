"""Stands in for sgl-kernel's CPU build, which is not published: SGLang imports names from it when it starts on a CPU.

Plain serving with ``--attention-backend torch_native`` calls none of them. Whatever is called says so.
"""

__version__ = "0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not in the stand-in for tests")

    return missing
