"""Writes the one file: which modules, in which order, and what is left of each."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

import libcst as cst

from minicache import __version__
from minicache_course.distil.flatten import flatten
from minicache_course.distil.fold import Renamed, drop_fields, drop_parameters, fold, inline_lists
from minicache_course.distil.sources import (
    Definition,
    Source,
    Uses,
    defined_names,
    is_ours,
    is_text,
    locals_of,
    members,
    read_source,
    uses,
)
from minicache_course.distil.strip import shortened, stripped, without_checks
from minicache_course.distil.tidy import WithoutAttributes, WithoutEffect, getters, unread_attributes
from minicache_course.errors import CourseError
from minicache_course.workspace import reference_file

_HAND: Final = (
    "minicache_course.distil.paged",
    "minicache_course.distil.llama",
    "minicache_course.distil.engine",
)

SECTIONS: Final[Sequence[tuple[str, Sequence[str]]]] = (
    ("Errors, and a request", ("minicache.errors", "minicache.request")),
    ("Blocks: which are free, and who refers to which", ("minicache.memory.blocks",)),
    ("The prefix cache: blocks by the hash of their tokens", ("minicache.memory.eviction", "minicache.memory.prefix")),
    ("The waiting queue", ("minicache.scheduler.queue",)),
    (
        "The scheduler: which tokens of which requests a step computes",
        (
            "minicache.scheduler.output",
            "minicache.scheduler.base",
            "minicache.scheduler.paged",
            "minicache.scheduler.fair",
            "minicache.scheduler.prefix_caching",
            "minicache.scheduler.sharing",
            "minicache.scheduler.chunked",
        ),
    ),
    ("Attention, without a cache and through block tables", ("minicache.cache.attention", "minicache.kernels.plain")),
    (
        "Keys and values, in blocks and in CPU swap space",
        ("minicache.engine.kv", "minicache.cache.rows", _HAND[0], "minicache.cache.paged", "minicache.cache.swap"),
    ),
    ("The model", ("minicache.model.minigpt", "minicache.model.decoder", _HAND[1])),
    ("Sampling", ("minicache.engine.picking", "minicache.engine.sampling")),
    ("The engine", ("minicache.engine.loop", _HAND[2])),
)
"""The sections of the file: title, modules. A module uses what is above it."""

_LINES: Final = {
    "ChunkedPrefillScheduler": (
        "minicache.scheduler.base:Scheduler",
        "minicache.scheduler.paged:PagedScheduler",
        "minicache.scheduler.fair:PriorityScheduler",
        "minicache.scheduler.fair:FairScheduler",
        "minicache.scheduler.prefix_caching:PrefixCachingScheduler",
        "minicache.scheduler.sharing:SharingScheduler",
        "minicache.scheduler.chunked:ChunkedPrefillScheduler",
    ),
    "Engine": ("minicache.engine.loop:EngineLoop", f"{_HAND[2]}:Engine"),
}
"""Classes that become one, under the last one's name."""

_INSTEAD: Final = {
    "MiniGPTConfig": "LlamaConfig",
    "Memory": "PagedMemory",
    "Model": "Llama",
    "Shape": "LlamaConfig",
    "Cache": "RaggedStep",
    "BlockTable": "RequestTable",
}
"""What is used in the place of a class of the package that is not taken."""

_WITHOUT: Final = {
    "SamplingParams": {"json_schema", "regex", "choice"},
    "Request": {"__slots__"},
    "RequestTable": {"__slots__"},
}
"""Attributes that the engine here has no use for: there are no constrained answers, and memory is no worry."""

_ALWAYS: Final = {
    "self.chunks_prompts": "True",
    "self.draft_token_ids": "()",
    "self.num_placeholders": "0",
    "self.blocks_to_store": "()",
    "self.blocks_to_load": "()",
    "self.ignore_eos": "False",  # of a Request: the engine leaves its end tokens out
    "request.ignore_eos": "False",
    "cache is None": "False",
    "Cache | None": "Cache",
    "lowest < 0": "False",  # of a slot mapping
    "cache.itemsize == 1": "False",  # fp8
    "zeros": "torch.zeros",
    "greedy(logits)": "logits.argmax(dim=-1)",
}
"""Source of an expression → what it always is here: no draft tokens, tiers, padding, 8-bit caches; always a cache."""

_IDLE: Final = {"self.memory.forget", "self.memory.clear", "scale=None"}
"""Functions whose calls do nothing here, and arguments that are the default."""

_OPTIONAL: Final[dict[str, Set[str]]] = {
    "Request": {"ignore_eos", "draft_token_ids", "num_placeholders", "other_block_ids"},
    "SchedulerOutput": {"draft_token_ids", "blocks_to_store", "blocks_to_load"},
    "AttentionMetadata": {"lengths", "num_new_tokens"},
}
"""Class → fields that are only of use with what is not here."""

_PUBLIC: Final = {"Engine", "Request", "ChunkedPrefillScheduler", "load_llama"}
"""What a reader calls, with any parameters."""

_RENAMED: Final = {"_checked": "_columns"}
"""Methods whose checks are gone."""

_ROOTS: Final = ("main", "__main__", "Engine")
_VALUES: Final = {code: cst.parse_expression(value) for code, value in _ALWAYS.items()}
_WIDTH: Final = 120
MAX_LINES: Final = 2000


def course_modules() -> list[str]:
    """The modules of the package that a file may be made of, in their order."""
    return [module for _, modules in SECTIONS for module in modules if module not in _HAND]


def distilled(files: Mapping[str, Path]) -> str:
    """An engine as one file.

    Args:
        files: module → a learner's finished file, to be taken instead of the reference's.

    Returns:
        Its text. With the reference's files it has at most MAX_LINES lines.

    Raises:
        CourseError: a file cannot be read as Python, uses a module of the package that is not taken, or lacks what
            others use of it.
    """
    sources = {
        module: read_source(module, files.get(module) or reference_file(module))
        for _, modules in SECTIONS
        for module in modules
    }
    stripped(sources.values())
    for source in sources.values():
        for name in _INSTEAD:
            source.definitions.pop(name, None)
        for name in source.definitions.keys() & _WITHOUT.keys():
            _drop_attributes(source.definitions[name], _WITHOUT[name])
        for definition in source.definitions.values():
            definition.nodes = [fold(node, _VALUES, _IDLE) for node in definition.nodes]
    for name in [name for module in _HAND for name in sources[module].definitions]:
        for source in sources.values():  # a definition by hand goes before the package's
            if source.module not in _HAND:
                source.definitions.pop(name, None)
    _flatten_lines(sources)
    book = _Book(sources)
    for _ in range(2):  # what is tidied away may have been the last use of something
        book.reach()
        book.tidy()
    book.reach()
    return _written(book, _header([module for module in course_modules() if module in files]))


def _header(own: Sequence[str]) -> str:
    """What the file says of itself."""
    whose = f"These modules are the learner's: {', '.join(map(_short, own))}; the others" if own else "All modules"
    text = (
        f"{whose} are the reference of minicache {__version__}. Stages are merged into their last class, docstrings "
        "cut after their first sentence, and checks of misuse left out. Written by hand for this file: the Llama, its "
        "loader, and the engine around the loop."
    )
    lines = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
    usage = "    python FILE FOLDER PROMPT …    (a Llama's Hugging Face folder; for text, pip install tokenizers)"
    return "\n".join(["An LLM serving engine in one file, by `minicache distil`.", "", *lines, "", usage, ""])


def _short(module: str) -> str:
    return module.removeprefix("minicache.").replace(".", "/")


def _drop_attributes(definition: Definition, names: Set[str]) -> None:
    """Drop attributes of a class."""
    node = definition.node
    assert isinstance(node, cst.ClassDef)
    body = [each for each in members(node) if not names & set(defined_names(each))]
    definition.nodes[0] = node.with_changes(body=node.body.with_changes(body=body))


def _flatten_lines(sources: Mapping[str, Source]) -> None:
    for name, line in _LINES.items():
        stages = []
        for module, _, stage in (each.partition(":") for each in line):
            if stage not in sources[module].definitions:
                raise CourseError(f"{sources[module].file} does not define {stage}")
            stages.append(sources[module].definitions[stage])
        flat = flatten(stages)
        for definition in stages[:-1]:
            del sources[definition.module].definitions[definition.name]
        for definition in stages:  # what it uses of each stage's module, it finds there
            sources[stages[-1].module].imports = {
                **{each: (definition.module, each) for each in sources[definition.module].definitions},
                **sources[definition.module].imports,
                **sources[stages[-1].module].imports,
            }
        sources[stages[-1].module].definitions[name] = flat


class _Book:
    """All definitions, and those of them that are used."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self.reached: dict[tuple[str, str], None] = {}
        self.attributes: set[str] = set()
        self.external: dict[str, tuple[str, str]] = {}  # imports of the file: name → (module, name there)
        self._everywhere: dict[str, list[str]] = {}  # name → modules that define it
        for source in sources.values():
            for name in source.definitions:
                self._everywhere.setdefault(name, []).append(source.module)
        self._stages = {each.partition(":")[2]: name for name, line in _LINES.items() for each in line}

    def find(self, module: str, name: str) -> tuple[str, str] | None:
        """Where a name of the package is defined; None if it is nothing of the package's."""
        name = self._stages.get(name, _INSTEAD.get(name, name))
        if module in self.sources and name in self.sources[module].definitions:
            return module, name
        homes = self._everywhere.get(name, [])
        by_hand = [home for home in homes if home in _HAND]
        if len(homes) == 1 or by_hand:
            return (by_hand or homes)[0], name
        return None

    def resolve(self, source: Source, name: str, attribute: str = "") -> tuple[str, str] | None:
        """What a name in a module means, or an attribute of it, if it is a module: where it is defined."""
        if name in source.definitions and not attribute:
            return source.module, name
        if name not in source.imports:
            its = self._stages.get(name, _INSTEAD.get(name, name))
            is_replaced = its != name or any(name in self.sources[module].definitions for module in _HAND)
            return self.find(source.module, name) if is_replaced and not attribute else None
        module, there = source.imports[name]
        if not is_ours(module):
            return None
        if attribute:
            return self.find(f"{module}.{there}", attribute)
        found = self.find(module, there)
        if found is None and not self._is_module(module, there):
            raise CourseError(
                f"{source.file} uses {there} of {module}, which is not part of the one file: write it without"
            )
        return found

    def _is_module(self, module: str, name: str) -> bool:
        path = reference_file(f"{module}.{name}")
        return path.is_file() or path.with_suffix("").is_dir()

    def reach(self) -> None:
        """Find what is used, from the roots on."""
        self.reached, self.attributes, self.external = {}, set(), {}
        todo = [found for name in _ROOTS if (found := self.find(_HAND[2], name))]
        done: set[tuple[str, str, str]] = set()
        while todo or any(self._news(done)):
            for key in todo:
                self.reached[key] = None
            todo = []
            for key, part, nodes in list(self._news(done)):
                done.add((*key, part))
                source, used = self.sources[key[0]], uses(nodes)
                self.attributes |= used.attributes
                todo += [each for each in self._targets(source, used) if each not in self.reached]

    def _news(self, done: Collection[tuple[str, str, str]]) -> Iterator[tuple[tuple[str, str], str, list[cst.CSTNode]]]:
        """Parts of reached definitions that are used, and were not looked at yet."""
        for key in list(self.reached):
            definition = self.sources[key[0]].definitions[key[1]]
            for part, nodes in self.parts(definition):
                if (*key, part) not in done:
                    yield key, part, nodes

    def parts(self, definition: Definition) -> Iterator[tuple[str, list[cst.CSTNode]]]:
        """The parts of a definition that are used: of a class, each method that is called by name somewhere."""
        node = definition.node
        if not isinstance(node, cst.ClassDef):
            yield "", [*definition.nodes]
            return
        methods = [each for each in members(node) if isinstance(each, cst.FunctionDef)]
        rest = [each for each in members(node) if not isinstance(each, cst.FunctionDef)]
        yield "", [*node.decorators, *[each.value for each in node.bases], *rest]
        for method in methods:
            if self.keeps(method):
                yield method.name.value, [method]

    def keeps(self, method: cst.FunctionDef) -> bool:
        """Whether a method of a class that is used stays."""
        name = method.name.value
        return name.startswith("__") or name == "forward" or name in self.attributes

    def _targets(self, source: Source, used: Uses) -> Iterator[tuple[str, str]]:
        for name in sorted(used.names):
            if (found := self.resolve(source, name)) is not None:
                yield found
            elif (line := source.imports.get(name)) is None or is_ours(line[0]):
                continue
            elif self.external.setdefault(name, line) != line:
                raise CourseError(f"{source.file} imports another {name} than the other files: rename it")
        for name, attribute in sorted(used.chains):
            if name in source.imports and (found := self.resolve(source, name, attribute)) is not None:
                yield found

    def tidy(self) -> None:
        """Drop what has no use in what is left."""
        definitions = [self.sources[module].definitions[name] for module, name in self.reached]
        for definition in definitions:
            definition.nodes[0] = self.without_unused(definition.node)
        inline_lists(definitions)
        drop_parameters(definitions, _PUBLIC)
        drop_fields(definitions, _OPTIONAL)
        methods = [
            (member.name.value, member)
            for definition in definitions
            if isinstance(definition.node, cst.ClassDef)
            for member in members(definition.node)
            if isinstance(member, cst.FunctionDef)
        ]
        effects = WithoutEffect(getters(methods))
        for definition in definitions:
            node = definition.node
            if isinstance(node, cst.ClassDef):
                changed = node.visit(effects).visit(WithoutAttributes(unread_attributes([node])))  # type: ignore[union-attr]
                assert isinstance(changed, cst.ClassDef)
                definition.nodes[0] = changed
            definition.nodes[0] = without_checks(fold(definition.node, {}, _IDLE))

    def without_unused(self, node: cst.BaseStatement) -> cst.BaseStatement:
        if not isinstance(node, cst.ClassDef):
            return node
        body = [each for each in members(node) if not isinstance(each, cst.FunctionDef) or self.keeps(each)]
        if node.name.value in _LINES:  # what a class says of its stage, or of an attribute that it sets
            body = [each for each in body if isinstance(each, cst.FunctionDef) or is_text(each)]
        return node.with_changes(body=node.body.with_changes(body=body))

    def new_names(self) -> dict[tuple[str, str], str]:
        """The name in the file of each definition: its own, unless an earlier one has it."""
        taken: set[str] = set()
        names = {}
        for module, name in self.in_order():
            label = module.rpartition(".")[2]
            new = f"_{label}{name}" if name in taken else name
            taken.add(new)
            names[module, name] = new
        return names

    def in_order(self) -> list[tuple[str, str]]:
        """All definitions that are used, as they come in the file."""
        return [
            (module, name)
            for _, modules in SECTIONS
            for module in modules
            for name in self.sources[module].definitions
            if (module, name) in self.reached
        ]


class _Renamer(cst.CSTTransformer):
    """Gives a definition's names those of the file."""

    def __init__(self, book: _Book, source: Source, names: Mapping[tuple[str, str], str]) -> None:
        super().__init__()
        self._book = book
        self._source = source
        self._names = names
        self._locals: list[set[str]] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Its locals shadow."""
        self._locals.append(locals_of(node))

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Its locals end."""
        self._locals.pop()
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute | cst.Name:
        """`module.name` becomes `name`."""
        owner = original_node.value
        if isinstance(owner, cst.Name) and not self._is_local(owner.value) and owner.value in self._source.imports:
            found = self._book.resolve(self._source, owner.value, original_node.attr.value)
            if found and found in self._names:
                return cst.Name(self._names[found])
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """A keyword keeps its name."""
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        """A name of the package."""
        if self._is_local(original_node.value):
            return updated_node
        found = self._book.resolve(self._source, original_node.value)
        new = self._names.get(found) if found else None
        return updated_node.with_changes(value=new) if new else updated_node

    def _is_local(self, name: str) -> bool:
        return any(name in each for each in self._locals)


def _written(book: _Book, header: str) -> str:
    names, lines = book.new_names(), []
    for title, modules in SECTIONS:
        bodies = []
        for module in modules:
            source = book.sources[module]
            for name, definition in source.definitions.items():
                if (module, name) in book.reached:
                    renamed = book.without_unused(definition.node).visit(Renamed(_RENAMED))
                    assert isinstance(renamed, cst.BaseStatement)
                    node = renamed.visit(_Renamer(book, source, names))
                    assert isinstance(node, cst.BaseStatement)
                    bodies.append(_code(_laid_out(node, 0), definition.nodes[1:]))
        if bodies:
            files = ", ".join(_short(each) for each in modules if each not in _HAND)
            shown = textwrap.wrap(f"From {files}.", _WIDTH - 2, break_on_hyphens=False)
            lines.append("\n".join(f"# {line}" for line in (f"{title} ".ljust(_WIDTH - 2, "-"), *shown)))
            lines += bodies
    top = f'"""{header}"""\n\nfrom __future__ import annotations\n\n{_import_lines(book.external)}\n\n'
    return top + "\n\n\n".join(part.strip("\n") for part in lines) + "\n"


def _code(node: cst.BaseStatement, texts: Sequence[cst.BaseStatement]) -> str:
    shown = [shortened(each, 0) for each in texts if isinstance(each, cst.SimpleStatementLine)]
    assert isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement)
    return cst.Module([node, *(each.with_changes(leading_lines=[]) for each in shown)]).code


def _laid_out(node: cst.BaseStatement, indent: int) -> cst.BaseStatement:
    """A definition with its docstrings cut, and one blank line between methods."""
    node = _attached(node, blank=indent > 0)
    if not isinstance(node, cst.ClassDef | cst.FunctionDef) or not isinstance(node.body, cst.IndentedBlock):
        return node
    body: list[cst.BaseStatement] = []
    for number, each in enumerate(node.body.body):
        if number == 0 and is_text(each):
            assert isinstance(each, cst.SimpleStatementLine)
            body.append(shortened(each, indent + 4))
        elif isinstance(node, cst.ClassDef):
            if is_text(each) and not isinstance(node.body.body[number - 1], cst.FunctionDef):
                assert isinstance(each, cst.SimpleStatementLine)
                body.append(shortened(each, indent + 4))
            else:
                is_function = isinstance(each, cst.FunctionDef)
                laid = _laid_out(each, indent + 4) if is_function else _attached(each, blank=number == 1)
                body.append(laid if number else _attached(laid, blank=False))
        else:
            is_first = number == 0 or (number == 1 and is_text(node.body.body[0]))
            body.append(_attached(each, blank=False) if is_first else each)
    return node.with_changes(body=node.body.with_changes(body=body))


def _attached(node: cst.BaseStatement, *, blank: bool) -> cst.BaseStatement:
    """A statement with the comments right above it only, and a blank line above these or not."""
    comments: list[cst.EmptyLine] = []
    for line in node.leading_lines:  # type: ignore[attr-defined]
        comments = [*comments, line] if line.comment else []
    return node.with_changes(leading_lines=[*([cst.EmptyLine(indent=False)] if blank else []), *comments])


def _import_lines(imports: Mapping[str, tuple[str, str]]) -> str:
    """Import statements, the standard library first."""
    plain: set[str] = set()
    grouped: dict[str, set[str]] = {}
    for alias, (module, name) in imports.items():
        if not name:
            plain.add(f"import {module}" if alias == module.split(".")[0] else f"import {module} as {alias}")
        elif module == "torch.nn" and name == "functional":
            plain.add("import torch.nn.functional as F")
        else:
            grouped.setdefault(module, set()).add(name if alias == name else f"{name} as {alias}")
    texts: dict[bool, list[str]] = {True: [], False: []}
    for line in sorted(plain):
        texts[line.split()[1].split(".")[0] in sys.stdlib_module_names].append(line)
    for module in sorted(grouped):
        names = sorted(grouped[module], key=lambda each: (not each.isupper(), each[0].islower(), each))
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _WIDTH:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        texts[module.split(".")[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(texts[kind]) for kind in (True, False) if texts[kind])
