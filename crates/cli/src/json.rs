//! JSON on standard output: every document is an object with a version. docs/json.md lists the fields.

use std::collections::BTreeMap;

use serde::Serialize;

/// The version of all documents. A field that changes its meaning or goes makes a new version; a new field does not.
pub const VERSION: u32 = 1;

/// A document: its version, then the fields of `content`.
#[derive(Serialize)]
struct Document<'a, T> {
    version: u32,
    #[serde(flatten)]
    content: &'a T,
}

/// A document of several lines. `content` serializes as an object, a struct with named fields.
pub fn document(content: &impl Serialize) -> String {
    serde_json::to_string_pretty(&Document { version: VERSION, content })
        .expect("strings and numbers always serialize")
        + "\n"
}

/// The same in one line, for documents that follow each other.
fn line(content: &impl Serialize) -> String {
    serde_json::to_string(&Document { version: VERSION, content })
        .expect("strings and numbers always serialize")
        + "\n"
}

/// A document with one field, a list.
pub fn list<T: Serialize>(name: &str, items: &[T]) -> String {
    document(&BTreeMap::from([(name, items)]))
}

/// The same in one line.
pub fn list_line<T: Serialize>(name: &str, items: &[T]) -> String {
    line(&BTreeMap::from([(name, items)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_comes_before_the_fields() {
        #[derive(Serialize)]
        struct Content {
            name: &'static str,
        }
        assert_eq!(line(&Content { name: "x" }), "{\"version\":1,\"name\":\"x\"}\n");
        assert_eq!(list_line("numbers", &[1, 2]), "{\"version\":1,\"numbers\":[1,2]}\n");
        assert_eq!(document(&Content { name: "x" }), "{\n  \"version\": 1,\n  \"name\": \"x\"\n}\n");
    }
}
