"""Code that stored settings name by import path, and which of it may be imported.

A checkpoint may come from another user. Without trust, a reference in it can only name a class of
flowrl, in a setting that takes such a class, or a class that the caller has passed in. It cannot
reach other objects through the attributes of a module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from flowrl.data.checkpoint import CheckpointError
from flowrl.settings import import_object

PLAN_MODULE = "flowrl_plan_"
"""Prefix of the module name of a plan file; the file's stem follows."""
SETTINGS_CLASS = "flowrl.settings:Settings"
POLICY_CLASS = "flowrl.policies.policy:Policy"

# setting -> base class of the flowrl classes that a checkpoint may name there without trust;
# references in all other settings need trust
BASES = {
    "policy_class": POLICY_CLASS,
    "policies": POLICY_CLASS,
    "custom_model": "flowrl.policies.models.base:ModelV2",
    "callbacks_class": "flowrl.sampling.callbacks:DefaultCallbacks",
    "sample_collector": "flowrl.sampling.sample_collector:SampleCollector",
}


class UntrustedCodeError(CheckpointError):
    """A checkpoint names code without being trusted.

    Args:
        code: what it contains, such as "the code 'module:Class'".
        remedy: what to do.
        path: the checkpoint, for the message; None if unknown.
        setting: the setting that names the code, such as "model.custom_model"; None if none does.
    """

    def __init__(self, code: str, remedy: str, path: Any = None, setting: str | None = None):
        where = "" if path is None else f"{path}: "
        if setting is None:
            super().__init__(f"{where}the state contains {code}, which is not trusted: {remedy}")
        else:
            changes = "…"
            # a mapping would change a policy of the checkpoint, whose code is not trusted
            names = ["policies"] if setting.startswith("policies.") else setting.split(".")
            for name in reversed(names):
                changes = f"{{{name!r}: {changes}}}"
            super().__init__(
                f"{where}its setting {setting} is {code}, which is not trusted: pass the setting "
                f"again, config={changes}, or trust=True to allow the import"
            )
        self.code, self.remedy, self.setting = code, remedy, setting

    def within(self, setting: str) -> UntrustedCodeError:
        """Return the error of a setting that contains the one of this error."""
        name = setting if self.setting is None else f"{setting}.{self.setting}"
        return UntrustedCodeError(self.code, self.remedy, setting=name)


def code_path(code: Any) -> str:
    """Return the import path "module:name" of a class or function."""
    return f"{code.__module__}:{code.__qualname__}"


class CodeResolver:
    """Import code by its path.

    Args:
        trust: import any code.
        known: import path -> class that the caller has passed in.
        modules: names of modules whose own classes and functions may be named: those of shipped
            plans.
    """

    def __init__(
        self,
        trust: bool = False,
        known: Mapping[str, Any] | None = None,
        modules: Collection[str] = (),
    ):
        self.trust = trust
        self._known = dict(known or {})
        self._modules = modules

    def resolve(self, path: str, base: str | None) -> Any:
        """Return the code of an import path.

        Args:
            path: import path "module:name".
            base: import path of a class; without trust, code outside of `modules` must be a
                subclass of it. None allows only functions and classes of `modules`.

        Raises:
            CheckpointError: the code is not trusted.
            ImportError, AttributeError: the code does not exist.
        """
        if self.trust:
            return self._known[path] if path in self._known else import_object(path)
        if path in self._known:
            # constructing a class in a setting of another kind could run code: A2C(**env_config)
            return _of_kind(self._known[path], base, path)
        module, _, name = path.partition(":")
        if module in self._modules:
            return _own_member(module, name, path)
        if base is None or not _is_in_flowrl(module):
            raise untrusted(f"the code {path!r}")
        return _of_kind(_own_member(module, name, path), base, path)


def untrusted(code: str) -> UntrustedCodeError:
    """Return the error of code that a checkpoint names without being trusted."""
    return UntrustedCodeError(
        code,
        "pass trust=True to allow its import, replace the setting with config={…}, or import the "
        "class and call its from_checkpoint()",
    )


def _of_kind(code: Any, base: str | None, path: str) -> Any:
    """Return a class that is a subclass of the class with the import path `base`."""
    if base is None or not (isinstance(code, type) and issubclass(code, import_object(base))):
        raise untrusted(f"the code {path!r}")
    return code


def _is_in_flowrl(module: str) -> bool:
    names = module.split(".")
    return names[0] == "flowrl" and len(names) > 1 and "__main__" not in names


def _own_member(module: str, name: str, path: str) -> Any:
    """Return a public class or function that a module itself defines."""
    if not name.isidentifier() or name.startswith("_"):
        raise untrusted(f"the code {path!r}")
    found = import_module(module)
    member = getattr(found, name)
    exported = name in getattr(found, "__all__", [name])
    if not exported or getattr(member, "__module__", None) != module:
        raise untrusted(f"the code {path!r}")
    return member
