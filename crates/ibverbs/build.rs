//! Generates the lists of functions of the private version nodes (`private_nodes.txt`), one for each macro of
//! `src/private_nodes.rs`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

const TABLE: &str = "private_nodes.txt";

fn main() {
    println!("cargo::rerun-if-changed={TABLE}");
    let table = std::fs::read_to_string(TABLE).expect("private_nodes.txt is readable");
    let rows =
        table.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(' ').collect::<Vec<_>>());
    let (mut nodes, mut functions) = (Vec::new(), BTreeMap::<String, String>::new());
    for row in rows {
        match row[..] {
            ["nodes", ref all @ ..] => nodes = all.iter().map(|node| number(node)).collect(),
            [name, kind, first] => define(&mut functions, &nodes, name, kind, number(first), u32::MAX),
            [name, kind, first, last] => {
                define(&mut functions, &nodes, name, kind, number(first), number(last))
            }
            [""] => {}
            _ => panic!("{TABLE}: not a row: {row:?}"),
        }
    }
    let lists: String = functions.iter().map(|(kind, names)| format!("{kind}! {{\n{names}}}\n")).collect();
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("private_nodes.rs"), lists).expect("a file in cargo's directory");
}

fn number(text: &str) -> u32 {
    text.parse().unwrap_or_else(|_| panic!("{TABLE}: not a node: {text:?}"))
}

fn define(
    functions: &mut BTreeMap<String, String>,
    nodes: &[u32],
    name: &str,
    kind: &str,
    first: u32,
    last: u32,
) {
    let list = functions.entry(kind.into()).or_default();
    for node in nodes.iter().filter(|node| (first..=last).contains(node)) {
        let name = name.replace("NODE", &node.to_string());
        writeln!(list, "    private_{node}__{name}").expect("writing to a string");
    }
}
