"""What mkdocs.yml calls while it builds: pages from files beside docs/, and docstrings as griffe can read them.

The house's docstrings say several names in one line ("offset, nbytes: ...") and errors in a sentence ("As `open`; ..."), which a
reader likes and a parser of Google's style does not. They are spelled out here, on their way to the site. All of this reads text;
nothing is imported from headrace.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

_BESIDE = {  # the first that fits counts
    "CONTRIBUTING.md": "contributing.md",
    "changes/README.md": "changes.md",
    "README.md#what-works-today": "status.md",
    "README.md": "index.md",
}
_LINK_TO_CODE = re.compile(r"\[[^\]]*\]\(((?:(?:examples|src|tests|scripts|benchmarks)/|LICENSE)[^)]*)\)")  # has no page here
_LINK_TO_PAGE = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?:\.\./)*(?P<page>reliability\.md)[^)]*\)")
_SECTION = re.compile(r"^(?P<indent> *)(?P<title>Args|Attributes|Raises):\n(?P<body>(?:(?P=indent) +\S.*(?:\n|\Z))+)", re.M)
_SEVERAL = re.compile(r"^(?P<names>\w+(?:, \w+)+)(?P<rest>: .*)", re.S)
_ERRORS = re.compile(r"^[A-Z]\w+(?:, [A-Z]\w+)*: ")
_SEE_PAGE = re.compile(r"\bdocs/([a-z-]+)\.md\b")
_AS_FOR = re.compile(r"\b([Aa]s (?:for )?)`(?:headrace\.)?(open|stream|load)`")
_LIST_BELOW_TEXT = re.compile(r"^((?!- )\S.*)\n(?=- )", re.M)  # Markdown's lists need a blank line in front
_CODE = re.compile(r"(?<![\[`])`(headrace\.)?([A-Za-z_]+)`(?!`)")


# -- pages -------------------------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Leave out of the navigation what is not written yet."""
    for section in config.nav:
        for pages in section.values():
            pages[:] = [page for page in pages if page in _GENERATED or _is_written(page)]
    return config


def _is_written(page: str) -> bool:
    return (ROOT / "docs" / page).exists()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside docs/, where a person who works on the code looks for them."""
    for name, text in _GENERATED.items():
        files.append(File.generated(config, name, content=text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of pages to files beside docs/ lead to these pages here."""
    for theirs, ours in _BESIDE.items():
        markdown = markdown.replace(f"../{theirs}", ours)
    return _LINK_TO_PAGE.sub(lambda link: link[0] if _is_written(link["page"]) else link["text"], markdown)


def _contributing() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return _to_site(re.sub(r"^ {3}(?=\S)", "    ", text, flags=re.M))  # below "1." Python-Markdown wants four spaces


def _to_site(text: str) -> str:
    """Links of a page at the root, as they are on the site."""
    text = (
        text.replace("](docs/", "](")
        .replace("](changes/README.md)", "](changes.md)")
        .replace("](CONTRIBUTING.md", "](contributing.md")
    )
    return _LINK_TO_CODE.sub(r"`\1`", text)


def _changes() -> str:
    parts = [path.read_text().strip() for path in sorted((ROOT / "changes").glob("[0-9]*.md"), reverse=True)]
    return "\n\n".join(["# Changes", "What a user would notice, the newest first.", *parts]) + "\n"


def _status() -> str:
    """What works, which the README says for all."""
    _, heading, section = (ROOT / "README.md").read_text().partition("\n## What works today\n")
    if not heading:
        raise ValueError("README.md has no section 'What works today' any more; see _status in scripts/_docs_hooks.py")
    return _to_site("# What works today\n" + section.partition("\n## ")[0] + "\n")


_GENERATED = {"status.md": _status, "contributing.md": _contributing, "changes.md": _changes}


# -- docstrings --------------------------------------------------------------------------------------------------------------


class Docstrings(griffe.Extension):
    """Spells out what the parser cannot read, and links the names that have a place in the reference."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = tidy(obj.docstring.value)


def tidy(text: str) -> str:
    """A docstring of ours in Google's style to the letter, with links."""
    return _with_links(_LIST_BELOW_TEXT.sub(r"\1\n\n", _SECTION.sub(_spelled_out, text)))


def _spelled_out(found: re.Match[str]) -> str:
    indent, entries = found["indent"], _entries(found["body"])
    if found["title"] == "Raises":
        return _raises(entries, indent)
    lines = [line for entry in entries for line in _one_by_one(entry)]
    return "".join([f"{indent}{found['title']}:\n", *(f"{indent}    {line}\n" for line in lines)])


def _entries(body: str) -> list[str]:
    """Entries of a section: a line, and those below that are indented further."""
    lines = body.splitlines()
    depth = len(lines[0]) - len(lines[0].lstrip())
    entries: list[str] = []
    for line in lines:
        if entries and line[: depth + 1].isspace():
            entries[-1] += "\n" + line[depth:]
        else:
            entries.append(line[depth:])
    return entries


def _one_by_one(entry: str) -> list[str]:
    several = _SEVERAL.match(entry)
    named = [name + several["rest"] for name in several["names"].split(", ")] if several else [entry]
    return [line for each in named for line in each.splitlines()]


def _raises(entries: list[str], indent: str) -> str:
    """A list where every entry begins with errors, else the sentence that it is."""
    joined = [" ".join(line.strip() for line in entry.splitlines()) for entry in entries]
    if all(_ERRORS.match(entry) for entry in joined):
        return "".join([f"{indent}**Raises**\n\n", *(f"{indent}- {_as_code(entry)}\n" for entry in joined)])
    return f"{indent}**Raises**\n\n{indent}{' '.join(joined)}\n"


def _as_code(entry: str) -> str:
    errors, _, meaning = entry.partition(": ")
    return ", ".join(f"`{error}`" for error in errors.split(", ")) + ": " + meaning


def _with_links(text: str) -> str:
    text = text.replace("][", "]&#91;")  # an address with optional parts, and no link of Markdown's
    text = _SEE_PAGE.sub(r"[docs/\1.md](../\1.md)", text)
    text = _AS_FOR.sub(r"\1[`\2`][headrace.\2]", text)
    return _CODE.sub(_linked, text)


def _linked(found: re.Match[str]) -> str:
    # Names in lower case are arguments as often as functions, unless they are written in full.
    package, name = found.groups()
    if name in _PUBLIC and (package or name[0].isupper()):
        return f"[`{name}`][headrace.{name}]"
    return found[0]


def _public_names() -> frozenset[str]:
    tree = ast.parse((ROOT / "src" / "headrace" / "__init__.py").read_text())
    lists = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    return frozenset(ast.literal_eval(next(lists)))


_PUBLIC = _public_names()
