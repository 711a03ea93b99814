"""Import circles of files stay small."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import module_circles

FILES_MAX = 5


def edges_of(**sources):
    """The edges of a crate with these files; `a__b` is the file `a/b.rs`."""
    with tempfile.TemporaryDirectory() as crate:
        for name, source in sources.items():
            path = pathlib.Path(crate, "src", *name.split("__")).with_suffix(".rs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        edges = module_circles.edges_of(module_circles.files_of(crate))
    return {"::".join(module): sorted("::".join(other) for other in others) for module, others in edges.items()}


class Circles(unittest.TestCase):
    def test_no_circle_is_large(self):
        crates = [path.parent for path in sorted(ROOT.glob("crates/*/Cargo.toml"))]
        self.assertGreater(len(crates), 10)
        for crate in crates:
            circles = module_circles.circles_of(module_circles.edges_of(module_circles.files_of(crate)))
            large = [circle for circle in circles if len(circle) > FILES_MAX]
            self.assertEqual(large, [], f"scripts/module_circles.py crates/{crate.name} shows the edges")

    def test_uses_paths_and_reexports_are_imports(self):
        found = edges_of(
            lib="mod a; mod b; mod c; mod d; pub use d::D;",
            a="use crate::{b::{self, B}, c as other};",
            b="fn f() { let x = 'x'; crate::c::g(); }",
            c="use std::mem; mod inner { fn f(_: super::super::d::D) {} }",
            d="macro_rules! m { () => { $crate::a::f() } }",
        )
        self.assertEqual(found, {"": ["d"], "a": ["b", "c"], "b": ["c"], "c": ["d"], "d": ["a"]})

    def test_a_path_through_a_name_is_an_import(self):
        found = edges_of(
            lib="mod a; mod b;",
            a__mod="mod x; pub mod y; fn f() { x::g(); }",
            a__x="use super::y; fn g() { y::h(); }",
            a__y="use super::super::b::B;",
            b="use crate::a; fn f() { a::y::h(); a::f(); }",
        )
        self.assertEqual(found, {"": [], "a": ["a::x"], "a::x": ["a::y"], "a::y": ["b"], "b": ["a", "a::y"]})

    def test_comments_literals_and_tests_are_no_imports(self):
        found = edges_of(
            lib="mod a; mod b; #[cfg(test)] mod tests;",
            a="""//! [`crate::b`]
                /* use crate::b; */ const S: &str = "crate::b::x"; const R: &str = r#"" crate::b "#;
                #[cfg(test)] use crate::b::{B};
                #[cfg(test)] mod tests { use crate::b; }
                fn f<'a>(_: &'a str) {}""",
            b="",
        )
        self.assertEqual(found, {"": [], "a": [], "b": []})

    def test_circles_are_found_largest_first(self):
        edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
        self.assertEqual(module_circles.circles_of(edges), [["c", "d", "e"], ["a", "b"]])


if __name__ == "__main__":
    unittest.main()
