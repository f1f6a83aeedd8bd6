"""Modules that are imported while a patch is active: adapted as soon as their code has run, whoever imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AdaptingFinder(MetaPathFinder):
    """Finds what the others find, and has it adapted once it is loaded.

    Args:
        packages: whose modules.
        adapt: called with each of them, when its code has run.
    """

    def __init__(self, packages: Sequence[str], adapt: Callable[[ModuleType], None]) -> None:
        self._packages, self._adapt = packages, adapt

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _AdaptingLoader(spec.loader, self._adapt)
                return spec
        return None


class _AdaptingLoader(Loader):
    """Loads as another loader does, and stands back before the module's code runs, which then sees that one."""

    def __init__(self, loader: Any, adapt: Callable[[ModuleType], None]) -> None:
        self._loader, self._adapt = loader, adapt

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
