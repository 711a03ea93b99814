"""The pages' links lead to files and headings that exist, the book has every page, and the pages' commands exist and can be executed."""

import glob
import os
import pathlib
import re
import shlex
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docs  # noqa: E402  (scripts/docs.py, which builds the book)

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*/README.md")])
# Programs of the system. `terrace` commands are parsed by crates/cli/tests/documents.rs.
FOREIGN = {"apt-get", "curl", "install", "kill", "losetup", "man", "mkdir", "mount", "podman", "printf", "python3", "rustup", "sha256sum", "ssh-keygen", "sysctl", "systemctl", "tar",
           "tshark", "mkswap", "nbd-client", "qemu-system-x86_64", "swapoff", "swapon", "umount", "build/tools/bin/cargo-nextest", "build/tools/bin/pytest", "environment/bin/pip", "$HOME/terrace/bin/pip"}


def links_of(text):
    """The targets of links outside of code."""
    return [match[3] for match in docs.links_in(text)]


def anchors_of(text):
    """The anchors of headings, as GitHub and mdBook form them."""
    titles = []
    docs.outside_code(text, lambda part: titles.extend(re.findall(r"^#+ (.*)", part, re.MULTILINE)) or part)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def problem_of(page, target):
    """Why a link of a page leads nowhere."""
    if "://" in target or target.startswith("mailto:"):
        return None if re.match(r"https?://[\w.-]+\.\w+(/|$)", target) else "not an address"
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "no such file"
    if anchor and anchor not in anchors_of(file.read_text()):
        return "no such heading"
    return None


def commands_of(text):
    """The simple commands of blocks of shell, each as its words."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\"?\$\([^)]*\)\"?", "SUBSTITUTED", line)
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;"):
                    if words:
                        yield words
                    words = []
                else:
                    words.append(word)


def problem_of_command(words):
    """Why a command of a page cannot be executed here."""
    name = words[0]
    if name == "make":
        targets = [word for word in words[1:] if "=" not in word and "/" not in word]
        makefile = (ROOT / "Makefile").read_text()
        missing = [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
        pattern = next((word for word in words if word.startswith("ONLY=") and "*" in word), None)
        return f"no target {missing}" if missing else f"{pattern}: -k of pytest has no patterns" if pattern else None
    if name == "cargo":
        if words[1] == "test":
            (package,) = [words[index + 1] for index, word in enumerate(words) if word == "-p"]
            return None if (ROOT / "crates" / package.removeprefix("terrace-")).is_dir() else f"no package {package}"
        example = words[words.index("--example") + 1]
        return None if list(ROOT.glob(f"crates/*/examples/{example}.rs")) else f"no example {example}"
    if pathlib.Path(name).name == "terrace":
        return None
    return None if name in FOREIGN else "an unknown program"


def make_commands_of(text):
    """The commands of make that stand in a line of prose or a table, each as its words."""
    return [shlex.split(code) for code in re.findall(r"`(make [^`\n]+)`", text)]


def crate_paths_of(text):
    """The files and folders below `crates/` that a page names between backticks."""
    return re.findall(r"`(crates/[^`\s]+)`", text)


def missing_paths(words):
    """Files of the repository that a command names and that do not exist."""
    own = [word for word in words if re.match(r"(bench|crates|docs|examples|scripts|tests)/", word)]
    built = [re.sub(r"^build/(examples/\w+)$", r"\1.c", word) for word in words if word.startswith("build/examples/")]
    return [path for path in own + built if not glob.glob(str(ROOT / path))]


class Links(unittest.TestCase):
    maxDiff = None

    def test_links_lead_to_files_and_headings(self):
        problems = [f"{page.relative_to(ROOT)}: {target}: {problem}" for page in PAGES for target in links_of(page.read_text())
                    if (problem := problem_of(page, target))]
        self.assertEqual(problems, [])

    def test_the_book_has_every_page_and_its_links_work(self):
        listed = {ROOT / page for page in docs.pages_of(docs.summary())}
        self.assertEqual({page for page in (ROOT / "docs").rglob("*.md") if page.name != "SUMMARY.md"} - listed, set())
        with tempfile.TemporaryDirectory() as directory:
            book = pathlib.Path(directory)
            docs.write_pages(book)
            problems = [f"{page.relative_to(book)}: {target}: {problem}" for page in book.rglob("*.md")
                        for target in links_of(page.read_text()) if (problem := problem_of(page, target))]
        self.assertEqual(problems, [])

    def test_commands_of_the_pages_exist(self):
        found = {page: [*commands_of(page.read_text()), *make_commands_of(page.read_text())] for page in PAGES}
        self.assertGreater(len(found[ROOT / "README.md"]), 15)
        self.assertGreater(sum(map(len, found.values())), 150)
        problems = [f"{page.relative_to(ROOT)}: {shlex.join(words)}: {problem}" for page, commands in found.items() for words in commands
                    if (problem := problem_of_command(words) or missing_paths(words))]
        self.assertEqual(problems, [])

    def test_files_of_crates_exist(self):
        found = {page: crate_paths_of(page.read_text()) for page in PAGES}
        self.assertGreater(sum(map(len, found.values())), 300)
        problems = [f"{page.relative_to(ROOT)}: {path}" for page, paths in found.items() for path in missing_paths(paths)]
        self.assertEqual(problems, [])

    def test_scripts_can_be_executed(self):
        scripts = [path for folder in ("bench", "packaging", "scripts", "tests") for kind in ("*.py", "*.sh") for path in (ROOT / folder).rglob(kind)
                   if path.read_bytes().startswith(b"#!")]
        self.assertGreater(len(scripts), 20)
        self.assertEqual([str(path.relative_to(ROOT)) for path in scripts if not os.access(path, os.X_OK)], [])

    def test_mistakes_are_found(self):
        page = ROOT / "README.md"
        self.assertEqual(problem_of(page, "docs/none.md"), "no such file")
        self.assertEqual(problem_of(page, "docs/limits.md#nothing"), "no such heading")
        self.assertIsNone(problem_of(page, "#licence"))
        self.assertEqual(problem_of(page, "https://nowhere"), "not an address")
        self.assertEqual(links_of("[a\nb](c) `[d](e)`\n```\n[f](g)\n```\n[`h`](i#j)\n"), ["c", "i#j"])
        self.assertEqual(list(commands_of("```sh\nmake a b=1 # c\nx \"$(y z)\" & u | v\n```")),
                         [["make", "a", "b=1"], ["x", "SUBSTITUTED"], ["u"], ["v"]])
        self.assertTrue(problem_of_command(["make", "nothing"]) and problem_of_command(["frobnicate"]))
        self.assertEqual(missing_paths(["examples/none.c", "build/examples/none", "examples/faults.toml"]),
                         ["examples/none.c", "examples/none.c"])


if __name__ == "__main__":
    unittest.main()
