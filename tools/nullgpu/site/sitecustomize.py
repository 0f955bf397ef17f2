"""Python runs this when it starts: on the emulated device every thread that uses torch emulates.

What is imported late is hooked, so that processes that never import torch start as quickly as ever.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import threading


def _after_torch(_):
    from tools.nullgpu import emulation

    run = threading.Thread.run

    def emulating(self):
        with emulation.Emulation():  # and leaves it: a thread that ends with it would end it without Python
            run(self)

    threading.Thread.run = emulating
    emulation.print_from_host()
    emulation.enter()


def _after_triton(_):
    from tools.nullgpu import interpreter

    interpreter.interpret_in_place()


def _after_distributed(module):
    from tools.nullgpu import backends

    if module.is_available():
        backends.gloo_for_nccl(module)


def _after_transformer_engine(_):
    from tools.nullgpu import transformer_engine

    transformer_engine.answer_by_torch()


HOOKS = {
    "torch": _after_torch, "torch.distributed": _after_distributed, "triton": _after_triton,
    "transformer_engine.pytorch": _after_transformer_engine,
}  # fmt: skip


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, hook):
        self.loader, self.hook = loader, hook

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.hook(module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, HOOKS[name])
        return spec


if "NULLGPU" in os.environ:
    sys.meta_path.insert(0, _Finder())
