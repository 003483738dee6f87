"""Every message of the package that a user can meet, read from its sources (ast): nothing is imported, nothing runs.

A sink is a call that makes a message: `ConfigError(...)`, another exception, a notice. A function whose parameters say
what a message says (`_refuse(key, rule)`) is a sink too, so the texts of its callers count. A text may be built from
f-strings, sums, conditions, local names, constants, tables and functions that return or yield texts; what only a run
knows stays as `{name}`.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hybrid5d"
MOST = 6  # alternatives of one text; beyond them a part stays as {name}
DEEP = 7  # names and functions followed
NOTICES = ("notice", "warn", "warning")
LISTS = ("notices", "unchecked", "readings", "passed_over", "passed")  # lists whose items a user reads
WRITERS = {
    ("cli/options", "refuse"): "refused", ("console", "say"): "progress", ("launch/watch", "_end"): "said",
    ("launch/watch", "_tell"): "said",
}  # fmt: skip
NOTICE = "notice: "
PARTS = ("key", "text", "fix")
Texts = tuple[str, ...]
Known = Mapping[str, Texts]  # parameters of the function at hand whose texts a caller gave
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Message:
    """One message: the module that makes it, its kind (an exception's class, or `notice`) and its parts."""

    module: str
    kind: str
    key: str
    text: str
    fix: str = ""

    @property
    def says(self) -> bool:
        """False where the whole text is another's that is handed on."""
        return says(self.text)


def says(text: str) -> bool:
    """Whether a text has words of its own beside its `{name}`s."""
    return sum(c.isalpha() for c in "".join(p.rpartition("}")[2] for p in text.split("{"))) > 1


@dataclass(frozen=True)
class Sink:
    """Makes a message of a call: expressions over the parameters of the function that is called."""

    kind: str
    module: Module | None
    parts: Mapping[str, ast.expr]
    parameters: tuple[str, ...]
    defaults: Mapping[str, ast.expr] = field(default_factory=dict)

    @staticmethod
    def plain(kind: str, *parameters: str, text: str = "text") -> Sink:
        """The arguments are the parts."""
        at = {"key": "key", "text": text, "fix": "fix"}
        return Sink(kind, None, {part: ast.Name(name) for part, name in at.items() if name in parameters}, parameters)


class Module:
    """A parsed file."""

    def __init__(self, path: Path, package: Path):
        self.name = path.relative_to(package).with_suffix("").as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.nodes: list[ast.AST] = [self.tree]
        self.parent: dict[ast.AST, ast.AST] = {}
        for node in self.nodes:  # grows
            children = list(ast.iter_child_nodes(node))
            self.nodes += children
            self.parent |= dict.fromkeys(children, node)
        self.calls = [n for n in self.nodes if isinstance(n, ast.Call)]
        self.functions = {n.name: n for n in self.nodes if isinstance(n, Function)}
        self.classes = [n for n in self.nodes if isinstance(n, ast.ClassDef)]
        self.inside: dict[ast.AST, list[ast.AST]] = {}
        froms = [n for n in self.nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("hybrid5d.")]
        self.imported = {
            a.asname or a.name: str(n.module).removeprefix("hybrid5d.").replace(".", "/")
            for n in froms
            for a in n.names
        }

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Names of the module's own assignments."""
        return {name: value for node in self.tree.body for name, value in assigned(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around one, from the inside."""
        found = self.parent.get(node)
        while found is not None:
            yield found
            found = self.parent.get(found)

    def scope(self, node: ast.AST) -> Function | None:
        """The function around a node."""
        return next((n for n in self.above(node) if isinstance(n, Function)), None)

    def walk(self, node: ast.AST) -> list[ast.AST]:
        """`ast.walk`, once."""
        if node not in self.inside:
            self.inside[node] = list(ast.walk(node))
        return self.inside[node]

    def loops(self, node: ast.AST) -> Iterator[ast.For | ast.comprehension]:
        """The loops and comprehensions around a node."""
        for one in self.above(node):
            yield from getattr(one, "generators", [one] if isinstance(one, ast.For) else [])


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement binds, each with its expression as far as the text says which."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _pairs(node.target, node.value)


def _pairs(target: ast.AST, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        for place, one in enumerate(target.elts):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                yield from _pairs(one, value.elts[place])
            elif isinstance(one, ast.Name):
                item = ast.Subscript(value, ast.Constant(place))
                ast.copy_location(item, value)
                yield one.id, item


def short(node: ast.AST) -> str:
    """The name that stands for a value which only a run knows."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return short(value)
        case ast.Call(func=ast.Attribute(attr="join"), args=[first]):
            return short(first)
        case ast.Call(func=ast.Name(id="len"), args=[first]):
            return f"number of {short(first)}"
        case ast.Call(func=ast.Name(id="getattr"), args=[_, _]):
            return "value"
        case ast.Call(func=ast.Name(id="map" | "filter"), args=[_, first]):
            return short(first)
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if hasattr(builtins, name):
            return short(first)
        case ast.Call(func=ast.Attribute(attr=name, value=value)):
            return short(value) if hasattr("", name) or name in ("get", "group", "item", "tolist") else name
        case ast.Call(func=func):
            return short(func)
        case ast.GeneratorExp(elt=elt, generators=[loop, *_]) | ast.ListComp(elt=elt, generators=[loop, *_]):
            return short(elt) if len(short(elt)) > 2 else short(loop.iter)
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(body=first) | ast.BinOp(left=first):
            return short(first)
        case ast.JoinedStr(values=values):
            return next((short(v) for v in values if isinstance(v, ast.FormattedValue)), "text")
    return "value"


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "id", None) or getattr(node.func, "attr", "")


def parameters(function: Function) -> tuple[str, ...]:
    """Names of the parameters, without self."""
    args = function.args
    return tuple(a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg not in ("self", "cls"))


class Reader:
    """Texts of expressions, over all modules."""

    def __init__(self, modules: Iterable[Module]):
        self.modules = list(modules)
        self.by_name = {m.name: m for m in self.modules}
        self.homes: dict[str, list[Module]] = {}  # function or constant -> modules that define it
        self.classes: dict[str, Module] = {}
        for module in self.modules:
            for name in {*module.functions, *module.constants}:
                self.homes.setdefault(name, []).append(module)
            self.classes |= {c.name: module for c in module.classes}

    def home(self, module: Module, name: str) -> Module | None:
        """The module that defines a name as this module sees it: itself, a base class's, or the only one."""
        if name in module.functions or name in module.constants:
            return module
        if origin := self.by_name.get(module.imported.get(name, "")):
            return origin
        if hasattr(builtins, name) or hasattr("", name):
            return None
        bases = [getattr(b, "id", "") for c in module.classes for b in c.bases]
        for home in (self.classes[b] for b in bases if b in self.classes):
            if name in home.functions:
                return home
        found = self.homes.get(name, [])
        return found[0] if len(found) == 1 else None

    def texts(self, module: Module, node: ast.expr | None, known: Known, depth: int = DEEP) -> Texts:
        """What a text may be."""
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return ("",)
        return self._texts(module, node, known, depth) or (f"{{{short(node)}}}",)

    def _texts(self, module: Module, node: ast.expr, known: Known, depth: int) -> Texts:
        match node:
            case ast.Constant(value=value):
                return (str(value),) if isinstance(value, str) or depth == DEEP else ()
            case ast.JoinedStr(values=parts):
                return self._product(module, parts, known, depth)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._product(module, [left, right], known, depth)
            case ast.FormattedValue(value=value, format_spec=None):
                found = self._texts(module, value, known, depth - 1) if depth else ()
                return found if len(found) <= MOST else ()
            case ast.NamedExpr(value=value):
                return self._texts(module, value, known, depth)
            case ast.IfExp(body=body, orelse=other):
                return self._either(module, [body, other], known, depth)
            case ast.BoolOp(op=ast.Or(), values=values):
                return self._either(module, values, known, depth)
        return self._named(module, node, known, depth - 1) if depth else ()

    def _named(self, module: Module, node: ast.expr, known: Known, depth: int) -> Texts:
        """Texts behind a name, an item or a call."""
        match node:
            case ast.Name(id=name):
                return known[name] if name in known else self._name(module, node, known, depth)
            case ast.Subscript(value=ast.Name(id=name)) if name.isupper() and (home := self.home(module, name)):
                table = home.constants.get(name)
                values = table.values if isinstance(table, ast.Dict) else []
                return tuple(v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str))
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int(place))):
                return self._of_function(module, call, place, depth)
            case ast.Call(func=ast.Name(id="next"), args=[first, *_]):
                return self.elements(module, first, known, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value="\n"), attr="join"), args=[lines]):
                return self.elements(module, lines, known, depth)
            case ast.Call():
                return self._of_function(module, node, None, depth)
        return ()

    def _product(self, module: Module, parts: list[ast.expr], known: Known, depth: int) -> Texts:
        found, count = [], 1
        for part in parts:
            texts = self.texts(module, part, known, depth)
            if all(t[:1].isalpha() or t[:1] == "{" for t in texts if t):
                texts = tuple(t for t in texts if t) or texts  # an empty one beside words is "nothing to say"
            texts = texts if count * len(texts) <= MOST else (f"{{{short(part)}}}",)
            count *= len(texts)
            found.append(texts)
        return tuple(dict.fromkeys("".join(p) for p in itertools.product(*found)))

    def _either(self, module: Module, nodes: list[ast.expr], known: Known, depth: int) -> Texts:
        return tuple(dict.fromkeys(t for n in nodes for t in self.texts(module, n, known, depth)))

    def _name(self, module: Module, use: ast.Name, known: Known, depth: int) -> Texts:
        for loop in module.loops(use):
            target = loop.target
            if isinstance(target, ast.Name) and target.id == use.id:
                return self.elements(module, loop.iter, known, depth)
            if isinstance(target, ast.Tuple) and use.id in (names := [getattr(t, "id", "") for t in target.elts]):
                return self.elements(module, loop.iter, known, depth, names.index(use.id))
        scope = module.scope(use)
        while scope is not None:
            if values := self._values(module, scope, use):
                return self._either(module, values, known, depth)
            if use.id in parameters(scope):
                return ()
            scope = module.scope(scope)
        home = self.home(module, use.id)
        value = home.constants.get(use.id) if home else None
        if home is None or not isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp):
            return ()
        return self._texts(home, value, {}, depth)

    def _values(self, module: Module, scope: Function, use: ast.Name) -> list[ast.expr]:
        """Values that a local name may have at a use."""
        around, values = {scope, *module.above(use)}, []
        for node in module.walk(scope):
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or node.lineno > use.lineno:
                continue
            found = [v for name, v in assigned(node) if name == use.id]
            block = module.parent[node]
            if not found or node in around or (block not in around and self._leaves(module, node)):
                continue
            if block in around and not isinstance(node, ast.NamedExpr) and not self._other_branch(module, node, use):
                values = [v for v in values if v.lineno > node.lineno]  # this one replaced those before it
            values += found
        said = [v for v in values if not (isinstance(v, ast.Constant) and v.value is None)]
        return said or values

    @staticmethod
    def _block(module: Module, node: ast.AST) -> list[ast.stmt]:
        parent = module.parent[node]
        blocks = (getattr(parent, name, []) for name in ("body", "orelse", "finalbody", "handlers"))
        return next((b for b in blocks if isinstance(b, list) and node in b), [])

    def _leaves(self, module: Module, node: ast.AST) -> bool:
        """Whether the statements after an assignment leave the function or the round of a loop."""
        block = self._block(module, node)
        return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue)

    def _other_branch(self, module: Module, node: ast.AST, use: ast.AST) -> bool:
        """Whether the use stands in the other branch of the `if` that holds an assignment."""
        above = [use, *module.above(use)]
        return not any(statement in above for statement in self._block(module, node))

    def _of_function(self, module: Module, call: ast.Call, place: int | None, depth: int) -> Texts:
        """Texts that a function of the package returns (`place`: in this place of a tuple)."""
        home = self.home(module, called(call))
        function = home.functions.get(called(call)) if home else None
        if home is None or function is None or not isinstance(call.func, ast.Name | ast.Attribute):
            return ()
        if function.returns is None or "str" not in ast.unparse(function.returns).replace("strip", ""):
            return ()
        values = [n.value for n in home.walk(function) if isinstance(n, ast.Return) and home.scope(n) is function]
        if place is not None:
            values = [v.elts[place] for v in values if isinstance(v, ast.Tuple) and len(v.elts) > place]
        texts = tuple(t for v in values if v is not None for t in self.texts(home, v, {}, depth) if t)
        return tuple(dict.fromkeys(texts)) if any(map(says, texts)) else ()

    def elements(self, module: Module, node: ast.expr, known: Known, depth: int, place: int | None = None) -> Texts:
        """Texts of the items of something list-like (`place`: of tuples)."""
        match node:
            case ast.Name(id=name) if f"{name}#{place}" in known:
                return known[f"{name}#{place}"]
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self.elements(module, value, known, depth, place)
            case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in ("iter", "list", "tuple", "sorted"):
                return self.elements(module, value, known, depth, place)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return tuple(t for item in items for t in self._item(module, item, known, depth, place))
            case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
                return self._item(module, item, known, depth, place)
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                both = (self.elements(module, side, known, depth, place) for side in (left, right))
                return tuple(itertools.chain(*both))
            case ast.Call() if depth and (home := self.home(module, called(node))) and called(node) in home.functions:
                return self.listed(home, home.functions[called(node)], depth - 1, place)
            case ast.Name() if depth and (scope := module.scope(node)) is not None:
                lists = (self.elements(module, v, known, depth - 1, place) for v in self._values(module, scope, node))
                return (*itertools.chain(*lists), *self._added(module, scope, node.id, depth - 1, place))
        return ()

    def _item(self, module: Module, node: ast.expr, known: Known, depth: int, place: int | None) -> Texts:
        if isinstance(node, ast.Starred):
            return self.elements(module, node.value, known, depth, place)
        if place is None:
            return self.texts(module, node, known, depth)
        if isinstance(node, ast.Tuple):
            return self.texts(module, node.elts[place], known, depth) if len(node.elts) > place else ()
        scope = module.scope(node)
        values = self._values(module, scope, node) if isinstance(node, ast.Name) and scope is not None else []
        found = [self._of_function(module, v, place, depth) for v in values if isinstance(v, ast.Call) and depth]
        return tuple(itertools.chain(*found))

    def _added(self, module: Module, scope: Function, name: str, depth: int, place: int | None) -> Texts:
        out: list[str] = []
        for node in module.walk(scope):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=n), attr="append"), args=[item]) if n == name:
                    out += self._item(module, item, {}, depth, place)
                case ast.AugAssign(target=ast.Name(id=n), value=value) if n == name:
                    out += self.elements(module, value, {}, depth, place)
        return tuple(out)

    def listed(self, module: Module, function: Function, depth: int = DEEP, place: int | None = None) -> Texts:
        """Texts that a function yields, or returns in a list."""
        out: list[str] = []
        for node in module.walk(function):
            match node:
                case ast.Yield(value=ast.expr() as value):
                    out += self._item(module, value, {}, depth, place)
                case ast.YieldFrom(value=value) | ast.Return(value=ast.expr() as value):
                    out += self.elements(module, value, {}, depth, place)
        return tuple(dict.fromkeys(out))


def given_to(call: ast.Call, sink: Sink) -> dict[str, ast.expr]:
    """The arguments by parameter."""
    names, values = sink.parameters, call.args
    if values and isinstance(values[0], ast.Starred):  # ConfigError(*key_and_value, rule, fix)
        names, values = names[len(names) - len(values) + 1 :], values[1:]
    given = dict(zip(names, values, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg is not None}
    return {n: v for n, v in given.items() if not isinstance(v, ast.Starred)}


class Finder:
    """Sinks and the messages that are made through them."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self.modules = [Module(path, package) for path in sorted(package.rglob("*.py"))]
        self.reader = Reader(self.modules)
        self.sinks: dict[tuple[str, str], Sink] = {}  # (module or "", name)
        self.exceptions = {n for n in dir(builtins) if n.endswith(("Error", "Exception"))} | {"DistBackendError"}
        for module in self.modules:
            self.exceptions |= {c.name for c in module.classes if self._raised(c)}
        self.exceptions -= {"ConfigErrors"}  # holds ConfigErrors
        self.sinks |= {("", name): Sink.plain(name, "text", "fix") for name in self.exceptions}
        self.sinks["", "ConfigError"] = Sink.plain("ConfigError", "key", "value", "rule", "fix", text="rule")
        self.sinks |= {("", name): Sink.plain("notice", "text") for name in NOTICES}
        self.sinks |= {place: Sink.plain(kind, "text") for place, kind in WRITERS.items()}
        self.uses: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module in self.modules:
            for call in module.calls:
                self.uses.setdefault(called(call), []).append((module, call))

    @staticmethod
    def _raised(node: ast.ClassDef) -> bool:
        return any(ast.unparse(b).endswith(("Error", "Exception", "Refused", "Failure")) for b in node.bases)

    def sink(self, module: Module, call: ast.Call) -> Sink | None:
        """What a call makes."""
        match call.func:
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr="add") if name == "faults":
                return Sink.plain("DataError", "path", "line", "text")
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr="append") if name in LISTS:
                return Sink.plain("notice", "text")
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr="say") if "console" in name:
                return Sink.plain("progress", "text")
            case ast.Name(id="OSError") if len(call.args) > 1:
                return Sink.plain("OSError", "errno", "text")
        home = self.reader.home(module, called(call))
        return self.sinks.get((home.name if home else "", called(call))) or self.sinks.get(("", called(call)))

    def arguments(self, module: Module, call: ast.Call, sink: Sink) -> dict[str, Texts]:
        """Texts of the arguments by parameter."""
        given = given_to(call, sink)
        found = {n: self.reader.texts(module, v, {}) for n, v in given.items()}
        for name, value in given.items():
            if isinstance(
                value, ast.Call | ast.Name | ast.List
            ):  # items of tuples, for a function that loops over them
                items = {f"{name}#{n}": self.reader.elements(module, value, {}, DEEP, n) for n in range(len(PARTS))}
                found |= {n: texts for n, texts in items.items() if texts}
        if sink.module is not None:
            missing = {n: v for n, v in sink.defaults.items() if n not in found}
            found |= {n: self.reader.texts(sink.module, v, {}) for n, v in missing.items()}
        return found

    def forward(self, module: Module, call: ast.Call, sink: Sink) -> None:
        """Make a sink of the function around a call where its parameters say what the message says."""
        scope = module.scope(call)
        if scope is None or (module.name, scope.name) in self.sinks or sink.module is not None:
            return
        if sink.kind in ("said", "progress"):
            return
        given = given_to(call, sink)
        parts = {part: given[e.id] for part, e in sink.parts.items() if isinstance(e, ast.Name) and e.id in given}
        names = parameters(scope)
        asked = {n.id for n in ast.walk(parts["text"]) if isinstance(n, ast.Name)} if "text" in parts else set()
        asked |= {i.id for loop in module.loops(call) if isinstance(i := loop.iter, ast.Name)}
        args = scope.args
        plain = [*args.posonlyargs, *args.args]
        defaults = {a.arg: d for a, d in zip(plain[len(plain) - len(args.defaults) :], args.defaults, strict=True)}
        defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
        made = Sink(sink.kind, module, parts, names, defaults)
        for other, use in self.uses.get(scope.name, []):
            if self.reader.home(other, scope.name) is module:
                texts = self.arguments(other, use, made)
                given = (t for name, found in texts.items() if name.partition("#")[0] in asked for t in found)
                if any(" " in t.strip() and says(t) for t in given):
                    self.sinks[module.name, scope.name] = made
                    return

    def made(self, module: Module, call: ast.Call, sink: Sink) -> Iterator[Message]:
        """The messages of a call."""
        known = self.arguments(module, call, sink)
        home = sink.module or module
        parts = {p: self.reader.texts(home, e, known) if sink.module or e.id in known else ("",)  # type: ignore[attr-defined]
                 for p, e in sink.parts.items()}  # fmt: skip
        if (module.name, getattr(module.scope(call), "name", "")) in self.sinks and sink.module is None:
            return  # its callers' texts count
        key, fix = (_joined(p, parts.get(p, ())) for p in ("key", "fix"))
        for text in parts.get("text", ()):
            if text:
                yield Message(module.name, sink.kind, key, " ".join(text.split()), " ".join(fix.split()))

    def messages(self) -> list[Message]:
        """All of them."""
        calls = [(m, c) for m in self.modules for c in m.calls]
        for module, call in calls:
            if sink := self.sink(module, call):
                self.forward(module, call, sink)
        found = {message for m, c in calls if (sink := self.sink(m, c)) for message in self.made(m, c, sink)}
        for module in self.modules:
            for name, function in module.functions.items():
                if name.endswith("notices"):
                    found |= {Message(module.name, "notice", "", t) for t in self.reader.listed(module, function)}
        return sorted(filter(None, map(_noticed, found)))


def _noticed(message: Message) -> Message | None:
    """A line that calls itself a notice is one; other lines of progress are no messages."""
    if message.kind in ("progress", "said") and message.text.startswith(NOTICE):
        return replace(message, kind="notice", text=message.text.removeprefix(NOTICE))
    return None if message.kind == "progress" else message


def _joined(part: str, texts: Texts) -> str:
    return " / ".join(t for t in texts if t) if len(texts) <= MOST // 2 else f"{{{part}}}"


def messages(package: Path = PACKAGE) -> list[Message]:
    """Every message, once per module that makes it."""
    return Finder(package).messages()
