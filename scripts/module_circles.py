#!/usr/bin/env python3
"""Prints the import circles among the files of each crate: the strongly connected components of its import graph.

A file imports another if it names an item of it: in a `use` or a re-export, or in a path that begins with `crate`,
`super`, a child module or an imported module. `mod child;` alone is no import, and tests are ignored. Each circle is
printed with its edges. The exit status is 1 if a circle has more than FILES files.
"""

import argparse
import pathlib
import re
import sys

TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|\s+)
    |(?P<text>b?c?r(?P<hashes>\#*)".*?"(?P=hashes)(?!\#)|[bc]?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^\\'])')
    |(?P<name>(?:r\#)?[A-Za-z_]\w*)
    |(?P<sign>::|.)""",
    re.VERBOSE | re.DOTALL,
)
OPENING, CLOSING = "([{", ")]}"


def tokens_of(source):
    """The tokens without comments; a literal is one token, `"`."""
    return [match[0] if match.lastgroup in ("name", "sign") else '"' for match in TOKEN.finditer(source) if match["skip"] is None]


def end_of_group(tokens, start):
    """The index past the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += (tokens[at] in OPENING) - (tokens[at] in CLOSING)
        if depth == 0:
            return at + 1
    return len(tokens)


def end_of_item(tokens, at):
    """The index past the item that begins at `at`, including its attributes."""
    while at < len(tokens) and tokens[at] != ";":
        if tokens[at] in OPENING:
            is_body = tokens[at] == "{"
            at = end_of_group(tokens, at)
            if is_body and tokens[at : at + 1] != [";"]:
                return at
        else:
            at += 1
    return at + 1


def without_tests(tokens):
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at : at + 3] == ["#", "[", "cfg"]:
            end = end_of_group(tokens, at + 1)
            condition = tokens[at + 3 : end]
            if "test" in condition and "not" not in condition:
                at = end_of_item(tokens, end)
                continue
        kept.append(tokens[at])
        at += 1
    return kept


def use_tree(tokens, at, prefix=()):
    """The paths of the use tree at `at`, each with the name that it binds, and the index past the tree."""
    path, bound = list(prefix), None
    while at < len(tokens):
        token = tokens[at]
        if token == "{":
            found, end = [], end_of_group(tokens, at)
            at += 1
            while at < end - 1:
                inner, at = use_tree(tokens, at, path)
                found += inner
                at += tokens[at] == ","
            return found, end
        if token == "as":
            bound, at = tokens[at + 1], at + 2
        elif token in (",", "}", ";"):
            break
        else:
            if token not in ("::", "self") or (token == "self" and not path):
                path.append(token)
            at += 1
    return [(tuple(path), bound or path[-1])], at


class File:
    """One file: the modules that it declares in separate files, and the paths that it names, with their inline module."""

    def __init__(self, module, source):
        self.module, self.children, self.uses, self.paths = module, [], [], []
        self.read(without_tests(tokens_of(source)), module)

    def read(self, tokens, inside):
        at = 0
        while at < len(tokens):
            token, following = tokens[at], tokens[at + 1 : at + 3]
            if token == "mod" and following[1:] == [";"]:
                self.children.append((*inside, following[0]))
                at += 3
            elif token == "mod" and following[1:] == ["{"]:
                end = end_of_group(tokens, at + 2)
                self.read(tokens[at + 3 : end - 1], (*inside, following[0]))
                at = end
            elif token == "use" and following and following[0] != "<":
                found, at = use_tree(tokens, at + 1)
                self.uses += [(inside, path, bound) for path, bound in found]
            elif following[:1] == ["::"] and tokens[at - 1 : at] != ["::"]:
                path = [token]
                while tokens[at + 1 : at + 2] == ["::"] and re.match(r"\w", tokens[at + 2]):
                    path.append(tokens[at + 2])
                    at += 2
                self.paths.append((inside, tuple(path)))
                at += 1
            else:
                at += 1


def absolute(path, inside, names):
    """The path from the crate's root, or None if it is outside of the crate."""
    if path[0] == "super":
        return absolute(("self", *path[1:]), inside[:-1], names)
    if path[0] == "crate":
        return path[1:]
    if path[0] == "self":
        while path[1:2] == ("super",):
            path, inside = ("self", *path[2:]), inside[:-1]
        return inside + path[1:]
    return names[path[0]] + path[1:] if path[0] in names else None


def files_of(crate):
    """The files of a crate by module path, starting at its root file."""
    source = pathlib.Path(crate) / "src"
    root = source / "lib.rs" if (source / "lib.rs").exists() else source / "main.rs"
    files, waiting = {}, [((), root)]
    while waiting:
        module, path = waiting.pop()
        files[module] = file = File(module, path.read_text())
        for child in file.children:
            flat = source.joinpath(*child).with_suffix(".rs")
            waiting.append((child, flat if flat.exists() else source.joinpath(*child, "mod.rs")))
    return files


def edges_of(files):
    """For each module the modules of other files that it names."""
    edges = {}
    for module, file in files.items():
        names = {child[-1]: child for child in file.children}
        named = []
        for inside, path, bound in file.uses:
            if (target := absolute(path, inside, names)) is not None:
                named.append(target)
                if target in files:
                    names[bound] = target
        named += [target for inside, path in file.paths if (target := absolute(path, inside, names)) is not None]
        owners = {next(target[:n] for n in range(len(target), -1, -1) if target[:n] in files) for target in named}
        edges[module] = owners - {module}
    return edges


def circles_of(edges):
    """The strongly connected components of more than one module (Tarjan), largest first."""
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for module in edges:
        if module not in index:
            visit(module)
    return sorted((circle for circle in found if len(circle) > 1), key=len, reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max", type=int, default=0, metavar="FILES", help="fail if a circle has more files")
    parser.add_argument("crates", nargs="+", metavar="CRATE_DIR")
    arguments = parser.parse_args()
    is_too_large = False
    for crate in arguments.crates:
        edges = edges_of(files_of(crate))
        for circle in circles_of(edges):
            is_too_large |= 0 < arguments.max < len(circle)
            print(f"{crate}: {len(circle)} files")
            for module in circle:
                within = sorted("::".join(other) or "crate" for other in edges[module] & set(circle))
                print(f"  {'::'.join(module) or 'crate'} -> {', '.join(within)}")
    return is_too_large


if __name__ == "__main__":
    sys.exit(main())
