"""The type stubs and documentation of `terrace._native`."""

import ast
import inspect
import pathlib
import unittest

import terrace
import terrace.aio
import terrace.errors
from terrace import _native

FOLDER = pathlib.Path(terrace.__file__).parent


def parameters_of_stub(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names + ([arguments.vararg.arg] if arguments.vararg else [])


class Stubs(unittest.TestCase):
    def setUp(self):
        nodes = ast.parse((FOLDER / "_native.pyi").read_text()).body
        self.functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}

    def test_the_package_is_typed(self):
        self.assertTrue((FOLDER / "py.typed").exists())

    def test_stubs_name_what_the_module_has(self):
        public = {name for name in vars(_native) if not name.startswith("_")}
        self.assertEqual({*self.functions, *self.classes}, public)

    def test_methods_and_parameters(self):
        for name, node in self.classes.items():
            found = getattr(_native, name)
            methods = {function.name: function for function in node.body if isinstance(function, ast.FunctionDef)}
            public = {member for member in vars(found) if not member.startswith("_")}
            self.assertEqual({method for method in methods if not method.startswith("_")}, public, name)
            for method, function in methods.items():
                value = vars(found)[method]
                if callable(value) and not method.startswith("__"):
                    with self.subTest(method=f"{name}.{method}"):
                        self.assertEqual(parameters_of_stub(function), list(inspect.signature(value).parameters))
        for name, function in self.functions.items():
            signature = inspect.signature(getattr(_native, name))
            self.assertEqual(parameters_of_stub(function), list(signature.parameters))

    def test_everything_public_is_documented(self):
        for module in (terrace, terrace.aio, terrace.errors):
            self.assertTrue(module.__doc__)
            for name in getattr(module, "__all__", vars(module)):
                value = getattr(module, name)
                if name.startswith("_") or not callable(value):
                    continue
                with self.subTest(name=name):
                    self.assertTrue(inspect.getdoc(value))
                members = vars(value) if inspect.isclass(value) else ()
                for member in (member for member in members if not member.startswith("_")):
                    with self.subTest(name=f"{name}.{member}"):
                        self.assertTrue(inspect.getdoc(vars(value)[member]))

    def test_methods_for_asyncio_are_those_without(self):
        for name in ("Client", "Region"):
            plain, awaited = getattr(terrace, name), getattr(terrace.aio, name)
            only_plain = {member for member in vars(plain) if not member.startswith(("_", "begin_"))} - set(vars(awaited))
            self.assertLessEqual(only_plain, {"counters"})


if __name__ == "__main__":
    unittest.main()
