"""What messages call an argument, in the words of whoever types commands: `verify='auto'` is `--verify auto` there.

Messages are written once, for programs. Here alone they are read for names of arguments: what the command has an option for is
called as that is, and a field of `Options` that it has none for as the variable of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace import HeadraceError, OptionError, Options

# name='value', name=PATH, or name= alone
_GIVEN = re.compile(r"(?<![^\s(])(?P<name>[a-z_]+)=(?:'(?P<quoted>[^']*)'|(?P<bare>-?\w+)|(?=[\s,;.)]))")
_FLAGS_OF = {"slices": "slice"}  # arguments that an option is called otherwise than


def flags_of(parameters: Sequence[Any]) -> dict[str, str]:
    """{argument of the API: option of the command}, such as {"memory_limit": "--memory-limit"}."""
    flags = [flag for parameter in parameters for flag in parameter.opts if flag.startswith("--")]
    return {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}


def spoken(message: str, flags: Mapping[str, str]) -> str:
    """The message with its arguments as they are typed."""

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], found["quoted"] if found["bare"] is None else found["bare"]
        if name in flags:
            return flags[name] if value in (None, "True") else f"{flags[name]} {value}"
        if name in Options.__dataclass_fields__:
            return f"HEADRACE_{name.upper()}={value or ''}"
        return found[0]

    return _GIVEN.sub(typed, message)


def spoken_error(error: HeadraceError, flags: Mapping[str, str]) -> str:
    """An error's message so; one that begins with the name of what it is about begins with the option."""
    message = str(error)
    if isinstance(error, OptionError):
        name = _FLAGS_OF.get(error.option, error.option)
        if name in flags:
            message = re.sub(rf"^{re.escape(name)}(?=[ :])", flags[name], message)
    return spoken(message, flags)
