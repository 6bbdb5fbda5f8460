"""``import_models.py FOLDER NAME...``: imports SGLang's model files from FOLDER, in an environment of another version.

What that environment has not (a module, or a name in one, that is no part of SGLang) is stood in for, and said: one
JSON object, ``{"files": {NAME: path}, "attached": [NAME...], "stood_in": [...]}``; a traceback where a file does not
import. ``attached``: the files that ask whether they are to capture.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
import types

TRIES = 60
stood_in: list[str] = []


class Thing(type):
    """A class that can be called, subscripted, compared and inherited from, and whose attributes are again such."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return thing(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # used as a decorator
        return thing(cls.__name__)

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


def thing(name):
    return Thing(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, and finds only the modules that an import has failed for, and what is below these."""

    def __init__(self):
        self.names = set()

    def find_spec(self, name, path=None, target=None):
        known = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: Thing.__getattr__(Thing, name)
        module.__version__ = "9.9.9"
        return module

    def exec_module(self, module):
        pass


def import_with_stand_ins(name, stand_ins):
    for _ in range(TRIES):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "sglang":
                raise
            stand_ins.names.add(error.name)
            stood_in.append(error.name)
        except ImportError as error:
            lacking = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if lacking is None or lacking[2].split(".")[0] == "sglang":
                raise
            setattr(sys.modules[lacking[2]], lacking[1], thing(lacking[1]))
            stood_in.append(f"{lacking[2]}.{lacking[1]}")
    raise RuntimeError(f"after {TRIES} tries: {stood_in}")


def main(folder, names):
    sys.path[0] = folder
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = lambda kind, config, exist_ok=False: register(kind, config, exist_ok=True)
    files, attached = {}, []
    for name in names:
        module = import_with_stand_ins(f"sglang.srt.models.{name}", stand_ins)
        files[name] = module.__file__
        if getattr(module, "_changeover_attach", None) is not None:
            attached.append(name)
    print(json.dumps({"files": files, "attached": attached, "stood_in": stood_in}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
