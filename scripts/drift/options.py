"""The options of Megatron's parser, read from its sources by the name under which argparse stores each, and those that
nobody has classified.

Megatron adds an option either by `add_argument`, or from the fields of a dataclass (`ArgumentGroupFactory(Config,
exclude=[…])`). Functions are followed from `add_megatron_arguments` into other modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from drift.compare import Finding
from drift.sources import Bound, Definition, Sources
from megatron_balance.mcore.options import Rule, flag_of

IRRELEVANT = Path(__file__).with_name("irrelevant_options.txt")
PARSER = "megatron.training.arguments:add_megatron_arguments"
_FACTORY = "ArgumentGroupFactory"

NOT_IN_EVERY_RELEASE = {
    # up to 0.17
    "use_legacy_models",
    # from 0.18, 0.19 and 0.20
    "moe_expert_rank_capacity_factor",
    "moe_paged_stash",
    "tensor_parallel_num_weight_shards",
    "logits_save_dir",
    "dataloader_inter_document_masking",
    "cp_partition_mode",
    "dynamic_context_parallel",
    "sequence_packing_scheduler",
    # of scripts alone
    "dataloader_save",
    "export_kd_teacher_load",
}
"""Options of rules that some release lacks."""


def options_of(sources: Sources) -> set[str]:
    """Names by which the parser stores its options; LookupError where it adds them in a form that is not known here."""
    module, _, name = PARSER.partition(":")
    return set(_options_of_function(module, name, sources=sources, seen=set()))


def _options_of_function(module: str, name: str, *, sources: Sources, seen: set[tuple[str, str]]) -> Iterator[str]:
    function = sources.find(f"{module}:{name}")
    if function is None:
        raise LookupError(f"there is no {module}:{name}")
    if (module, name) in seen:
        return
    seen.add((module, name))
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(attr="add_argument"):
                yield _stored_name(call)
            case ast.Name(id=factory) if factory == _FACTORY:
                yield from _options_of_factory(call, module=module, function=function, sources=sources)
            case ast.Name(id=called) if called != name and _takes_parser(call):
                found = _origin(module, called, function=function, sources=sources)
                if found is not None and isinstance(sources.find(f"{found.module}:{found.name}"), ast.FunctionDef):
                    yield from _options_of_function(found.module, found.name, sources=sources, seen=seen)


def _takes_parser(call: ast.Call) -> bool:
    """A function that adds options is handed the parser."""
    return any(isinstance(argument, ast.Name) and argument.id == "parser" for argument in call.args)


def _stored_name(call: ast.Call) -> str:
    """The name that argparse derives: `dest`, or the first long flag."""
    for keyword in call.keywords:
        if keyword.arg == "dest":
            return ast.literal_eval(keyword.value)
    flags = [ast.literal_eval(argument) for argument in call.args]
    long = [flag for flag in flags if flag.startswith("--")]
    return (long or flags)[0].lstrip("-").replace("-", "_")


def _options_of_factory(call: ast.Call, *, module: str, function: Definition, sources: Sources) -> Iterator[str]:
    """The fields of the dataclass but those that are excluded."""
    excluded: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg == "exclude":
            excluded = set(_list_of(keyword.value, function=function))
    match call.args:
        case [ast.Name(id=config), *_]:
            found = _origin(module, config, function=function, sources=sources)
            fields = _fields(found, sources=sources)
            yield from (stored for name, stored in fields.items() if name not in excluded)
        case _:
            raise LookupError(f"{module}: {ast.unparse(call)} is of no class that is named")


def _list_of(value: ast.expr, *, function: Definition) -> list[str]:
    """A list, or what the function last assigned to its name."""
    if not isinstance(value, ast.Name):
        return ast.literal_eval(value)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List() as found) if name == value.id:
                return ast.literal_eval(found)
    raise LookupError(f"{function.name} excludes {value.id}, which is no list there")


def _origin(module: str, name: str, *, function: Definition, sources: Sources) -> Bound | None:
    """The origin of a name that a function uses; some functions import it themselves."""
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return sources.origin(node.module, alias.name)
    return sources.origin(module, name)


def _fields(found: Bound | None, *, sources: Sources) -> dict[str, str]:
    """Fields of a dataclass that its constructor takes, those of its bases among them, and how each is stored."""
    definition = None if found is None else sources.find(f"{found.module}:{found.name}")
    if found is None or not isinstance(definition, ast.ClassDef):
        raise LookupError(f"a parser is made from {found}, which is no class of the sources")
    stored: dict[str, str] = {}
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id != "object":
            stored |= _fields(sources.origin(found.module, base.id), sources=sources)
    for node in definition.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=field), annotation=kind, value=value):
                if "ClassVar" not in ast.unparse(kind) and not _is_no_parameter(value):
                    stored[field] = _stored_otherwise(value) or field
    return stored


def _is_no_parameter(value: ast.expr | None) -> bool:
    """`field(init=False)`."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )


def _stored_otherwise(value: ast.expr | None) -> str | None:
    """`dest` in what a field says of its option, where it says one."""
    for node in ast.walk(value) if isinstance(value, ast.Call) else ():
        if isinstance(node, ast.Dict):
            for key, entry in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "dest":
                    return ast.literal_eval(entry)
    return None


def unclassified(rules: Sequence[Rule], *, sources: Sources, release: tuple[int, int] | None) -> Iterator[Finding]:
    """Options in no rule and not in irrelevant_options.txt; rules without an option of the release.

    Args:
        rules: of mcore/options.
        sources: of the release.
        release: as `(major, minor)`; None for a branch, which may say that it is a release and have other options.
    """
    options = options_of(sources)
    in_rules = {name for rule in rules for name in rule.names}
    lines = IRRELEVANT.read_text("utf-8").splitlines()
    patterns = [name for line in lines if not line.startswith("#") for name in line.split()]
    for name in sorted(options - in_rules):
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            says = f"is an option that neither a rule of mcore/options nor {IRRELEVANT.name} has"
            yield Finding(flag_of(name), False, says)
    for rule in rules if release is not None else ():
        if rule.names and not rule.names & (options | NOT_IN_EVERY_RELEASE):
            yield Finding(rule.words, True, "is a rule of no option of this release")
